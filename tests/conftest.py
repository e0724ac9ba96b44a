"""What holds for every test."""

from __future__ import annotations

import os
import sys
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several workers share few cores; read when torch is imported

# How long an example takes says more about the machine than about the code: no test of ours judges by time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

TESTS = Path(__file__).parent
E2E = TESTS.parent / "e2e"
LONGEST = (TESTS / "operator" / "test_recovery.py", TESTS / "server")
"""What computes longest comes first: short files fill the workers best at the end."""
FILES_BETWEEN = 9
"""Other files between two of `e2e`, which mostly wait: all at once they leave the cores idle."""
STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty"}
"""Audit events of a process that is started."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="leave out the tests that are marked slow, skip those that start a process"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        sys.addaudithook(_skip_processes)


def _skip_processes(event: str, _: object) -> None:
    if event in STARTS and "PYTEST_CURRENT_TEST" in os.environ:
        pytest.skip("starts a process")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """So that no core is idle from the first test to the last. Reorders files, never what is in one."""
    if config.getoption("--fast"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("slow")])
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    waiting = [tests for tests in files if tests[0].path.is_relative_to(E2E)]
    others = [tests for tests in files if not tests[0].path.is_relative_to(E2E)]
    others.sort(key=lambda tests: [not tests[0].path.is_relative_to(longest) for longest in LONGEST])
    for number, tests in enumerate(waiting):
        others.insert(number * (FILES_BETWEEN + 1), tests)
    items[:] = [item for tests in others for item in tests]
