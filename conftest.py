"""In which order files are tested, each of them whole: so that no core is idle, from the first to the last."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "tests"
E2E = Path(__file__).parent / "e2e"
LONGEST = (TESTS / "operator" / "test_recovery.py", TESTS / "server")
"""What computes longest comes first: short files fill the workers best at the end."""
FILES_BETWEEN = 9
"""Other files between two of `e2e`, which mostly wait: all at once they leave the cores idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reorders files, never what is in one."""
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    waiting = [tests for tests in files if tests[0].path.is_relative_to(E2E)]
    others = [tests for tests in files if not tests[0].path.is_relative_to(E2E)]
    others.sort(key=lambda tests: [not tests[0].path.is_relative_to(longest) for longest in LONGEST])
    for number, tests in enumerate(waiting):
        others.insert(number * (FILES_BETWEEN + 1), tests)
    items[:] = [item for tests in others for item in tests]
