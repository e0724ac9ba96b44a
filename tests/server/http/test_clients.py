"""The clients of examples/clients with their real packages, which `make test-clients` installs beside the environment.

They ask for other versions of our own dependencies, therefore each runs in an environment and a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model

EXAMPLES = Path(__file__).parents[3] / "examples" / "clients"
INSTALLED = Path(sys.prefix) / "clients"
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}


@pytest.mark.clients
@pytest.mark.parametrize("example", sorted(EXAMPLES.iterdir()), ids=lambda example: example.stem)
def test_example_runs_to_its_end(example: Path, start_server: Any, tmp_path: Path) -> None:
    """Each asserts what it receives; the model draws its tokens at random, and its answers to a schema may be long."""
    write_tiny_model(
        tmp_path, TinyModelSpec(layers=2, hidden_size=64, heads=4, kv_heads=2, max_position_embeddings=4096)
    )
    server = start_server(model=tmp_path)
    program = "node" if example.suffix == ".mjs" else str(INSTALLED / "bin" / "python")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": "none",
        **OFFLINE,
    }
    done = subprocess.run(
        [program, str(example), "tiny"],
        cwd=INSTALLED,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= 2, done.stdout
