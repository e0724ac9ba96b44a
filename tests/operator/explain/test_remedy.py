from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import llmservice_operator
from llmservice_operator.explain.remedy import remedy

SOURCE = Path(llmservice_operator.__file__).parent
REPORTERS = {"Trouble", "SizingProblem", "ModelSourceError"}
"""What carries a reason, as its first argument, from where something is wrong into a condition."""


def reasons() -> Iterator[str]:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in REPORTERS and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value


@pytest.mark.parametrize("reason", sorted(set(reasons())))
def test_every_reason_of_a_trouble_has_a_remedy(reason: str) -> None:
    """A new reason wants a sentence in operator/llmservice_operator/explain/remedy.py."""
    assert remedy(reason, "team-a", "tiny")


def test_commands_name_the_service() -> None:
    assert "-n team-a" in str(remedy("CrashLoopBackOff", "team-a", "tiny"))
    assert "instance=tiny" in str(remedy("Unschedulable", "team-a", "tiny"))


def test_where_nothing_is_wrong_there_is_nothing_to_do() -> None:
    assert remedy("Serving", "team-a", "tiny") is None
