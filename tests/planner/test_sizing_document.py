"""docs/sizing.md shows what the command prints today."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from llmservice_planner.command import main

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "sizing.md"
EXAMPLES = re.findall(r"```console\n\$ llmservice (.*)\n((?:.*\n)*?)```", DOCUMENT.read_text(encoding="utf-8"))


def test_the_document_has_its_examples() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize(("command", "printed"), EXAMPLES, ids=["fits", "does not fit", "curve"])
def test_an_example_is_what_the_command_prints(command: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(shlex.split(command))
    assert capsys.readouterr().out == printed


def test_the_readmes_example_is_what_the_command_prints_but_for_what_it_leaves_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    readme = DOCUMENT.parents[1].joinpath("README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```console\n\$ llmservice (plan .*\\\n.*)\n((?:.*\n)*?)```", readme)
    main(shlex.split(example[0].replace("\\\n", " ")))
    printed = capsys.readouterr().out
    for part in example[1].split("  …\n"):
        assert part in printed
