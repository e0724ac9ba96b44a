"""Processes and programs import only what they need: scheduling, HTTP and text import no torch."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import llmservice_server.engine.engine", {"torch"}),
        ("import llmservice_server.text.output_processor", {"torch", "fastapi", "prometheus_client"}),
        ("import llmservice_server.text.tool_calls", {"torch", "fastapi", "prometheus_client"}),
        ("import llmservice_server.http.server", {"torch", "numba"}),
        ("import llmservice_server.runtime.startup", {"fastapi"}),
        ("import llmservice_server.commands.serve", {"torch"}),
        ("import llmservice_server; llmservice_server.SamplingParams()", {"torch"}),
        ("import llmservice_server; llmservice_server.AsyncLLM", {"torch", "fastapi"}),
        ("import llmservice_server; llmservice_server.LLM", {"fastapi"}),
    ],
)
def test_a_program_imports_no_library_that_it_does_not_need(statement: str, absent: set[str]) -> None:
    script = f"import sys; {statement}; print(*{absent!r} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], timeout=120, check=True, capture_output=True, text=True)
    assert done.stdout == "\n"
