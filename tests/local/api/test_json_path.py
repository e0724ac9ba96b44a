from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.api.json_path import find

OBJECT = {
    "metadata": {"labels": {"a.b/c": "x"}},
    "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other", "status": "False"}]},
}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ('.status.conditions[?(@.type=="Ready")].status', ["True"]),
        (".status.conditions[*].status", ["True", "False"]),
        (".status.conditions[-1].type", ["Other"]),
        (".status.conditions[7].type", []),
        (".status.missing.deeper", []),
        (r".metadata.labels.a\.b/c", ["x"]),
        (".metadata.labels['a.b/c']", ["x"]),
    ],
)
def test_values_at_a_path(path: str, expected: list[Any]) -> None:
    assert find(OBJECT, path) == expected


def test_path_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot read"):
        find(OBJECT, ".status[?(@.x>1)]")
