"""From the repository's root nothing shadows the standard library, and every command loads without heavy libraries."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "kubernetes", "fastapi", "aiohttp")
COMMANDS = sorted(entry.name for entry in entry_points(group="llmservice.commands"))


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_python_from_the_root_finds_the_standard_library() -> None:
    """An `operator/__init__.py` would shadow its `operator` for every `python -m`."""
    finished = _python("-c", "import operator; print(operator.itemgetter(1)('ab'))")
    assert finished.stdout == "b\n", finished.stderr


def test_the_command_runs_as_a_module_from_the_root() -> None:
    finished = _python("-m", "llmservice_planner", "plan", "--list-gpus")
    assert finished.returncode == 0, finished.stderr
    assert "h100-80gb" in finished.stdout


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
