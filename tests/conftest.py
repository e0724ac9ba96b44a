"""What holds for every test."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

gc.disable()  # until all test modules are imported: most objects that imports make stay
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several workers share few cores; read when torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # numba sets more threads, which spin while others have the cores

# How long an example takes says more about the machine than about the code: no test of ours judges by time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

TESTS = Path(__file__).parent
E2E = TESTS.parent / "e2e"
LONGEST = (
    E2E,
    TESTS / "operator" / "test_recovery.py",
    TESTS / "operator" / "framework" / "test_operator.py",
    TESTS / "server",
)
"""What takes longest comes first: short files fill the workers best at the end."""
WAITING = ("e2e/", "tests/operator/framework/", "tests/server/commands/", "tests/server/http/")
"""Files that mostly wait for processes."""
PROCESSES = {"server", "start_server", "shared_server"}
"""Fixtures that start a server of its own process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out the tests that are marked slow or start a server")


def pytest_configure(config: pytest.Config) -> None:
    """Each worker imports the folders in another order: what one has compiled to bytecode, the others load."""
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and config.args == config.getini("testpaths"):
        places = [str(path) for path in (E2E, *sorted(TESTS.iterdir())) if path.is_dir() or path.match("test_*.py")]
        first = 3 * int(worker.removeprefix("gw")) % len(places)
        config.args[:] = places[first:] + places[:first]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        slow = [item for item in items if item.get_closest_marker("slow") or not PROCESSES.isdisjoint(_fixtures(item))]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
    items.sort(key=lambda item: ([not item.path.is_relative_to(longest) for longest in LONGEST], item.path))


class _Scheduler(LoadFileScheduling):
    """Two workers first run what computes, the others what waits."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        waits = node in self.nodes[2:]
        if file := next((file for file in self.workqueue if file.startswith(WAITING) == waits), None):
            self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _Scheduler | None:
    return _Scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """No garbage collection searches the 800,000 objects of all imported modules, few of which are garbage."""
    gc.freeze()
    gc.enable()


def _fixtures(item: pytest.Item) -> list[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else []
