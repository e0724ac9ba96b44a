"""Processes and programs pay only for what they use: scheduling and HTTP load no torch."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("llmservice_server.engine.engine", "torch"),
        ("llmservice_server.http.app", "torch"),
        ("llmservice_server.text.tokenizer", "torch"),
        ("llmservice_server.runtime.startup", "fastapi"),
        ("llmservice_server.commands.serve", "torch"),
    ],
)
def test_a_module_is_imported_without(module: str, absent: str) -> None:
    script = f"import {module}, sys; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 0
