"""Without `backend/cpu/` or `backend/cuda/` the server computes the same tokens on `backend/torch/`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import llmservice_server
from llmservice_server import LLM, SamplingParams

pytestmark = pytest.mark.slow

SOURCE = Path(llmservice_server.__file__).parent
SCRIPT = """
import json, sys
import llmservice_server
from llmservice_server import LLM, SamplingParams
llm = LLM(sys.argv[1], threads=1, kv_cache_memory_bytes=2**20)
params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
outputs = llm.generate(["One two three"], params, use_tqdm=False)
print(json.dumps([llmservice_server.__file__, llm.engine.runner.backend.name, outputs[0].outputs[0].token_ids]))
"""


def generate(packages: Path, model: Path) -> tuple[str, str, list[int]]:
    environment = os.environ | {"PYTHONPATH": str(packages)}
    command = [sys.executable, "-c", SCRIPT, str(model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    file, name, token_ids = json.loads(done.stdout.splitlines()[-1])
    return file, name, token_ids


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[int]:
    """The tokens of the whole package, in this process."""
    llm = LLM(tiny_model, threads=1, kv_cache_memory_bytes=2**20)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    return list(llm.generate(["One two three"], params, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize(("removed", "kept", "backend"), [("cpu", "cuda", "torch"), ("cuda", "cpu", "cpu")])
def test_a_server_without_a_backend_folder_works(
    removed: str, kept: str, backend: str, expected: list[int], tmp_path: Path, tiny_model: Path
) -> None:
    copied = tmp_path / "llmservice_server"
    shutil.copytree(SOURCE, copied, ignore=shutil.ignore_patterns("__pycache__", "cpu", "cuda"))
    (copied / "backend" / kept).symlink_to(SOURCE / "backend" / kept)  # a copy would be compiled anew
    assert not (copied / "backend" / removed).exists()
    file, name, token_ids = generate(tmp_path, tiny_model)
    assert Path(file).parent == copied
    assert name == backend
    assert token_ids == expected
