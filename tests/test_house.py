"""The house stands as ARCHITECTURE.md draws it: nothing shadows the standard library, every command loads lightly."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("planner", "server", "operator", "gateway", "local", "benchmarks")
HEAVY = ("torch", "transformers", "kubernetes", "fastapi", "aiohttp")
COMMANDS = sorted(entry.name for entry in entry_points(group="llmservice.commands"))


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_holds_one_package_and_is_none_itself(room: str) -> None:
    """`operator/__init__.py` would shadow the standard library's `operator` for every `python -m` from the root."""
    assert not (ROOT / room / "__init__.py").exists()
    assert len(list((ROOT / room).glob("llmservice_*/__init__.py"))) == 1


def test_python_from_the_root_finds_the_standard_library() -> None:
    finished = _python("-c", "import operator; print(operator.itemgetter(1)('ab'))")
    assert finished.stdout == "b\n", finished.stderr


def test_the_command_runs_as_a_module_from_the_root() -> None:
    finished = _python("-m", "llmservice_planner", "plan", "--list-gpus")
    assert finished.returncode == 0, finished.stderr
    assert "h100-80gb" in finished.stdout


def test_every_room_registers_its_commands() -> None:
    rooms = {"plan", "serve", "make-tiny-model", "operator", "crd", "alerts", "gateway", "bench", "up", "demo"}
    assert rooms <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_loads_without_the_heavy_libraries(name: str) -> None:
    """`llmservice --help` imports every command: it must not take the seconds that torch does."""
    script = f"""
import sys
from importlib.metadata import entry_points
from llmservice_planner.command import Command
(entry,) = entry_points(group="llmservice.commands", name={name!r})
assert isinstance(entry.load(), Command)
loaded = [module for module in {HEAVY!r} if module in sys.modules]
assert not loaded, f"loading it imports {{loaded}}"
"""
    finished = _python("-c", script)
    assert finished.returncode == 0, finished.stderr
