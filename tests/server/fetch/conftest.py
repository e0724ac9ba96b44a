"""A checkpoint's files, and a hub and a store on the loopback that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.model_hub import ModelHub
from harness.object_store import ObjectStore
from llmservice_server.fetch.fetch import FetchOptions, fetch
from llmservice_server.fetch.retry import RetryPolicy

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights" * 40_000,
    "consolidated.safetensors": b"the same weights",
    "pytorch_model.bin": b"a pickle",
    "README.md": b"words",
    "original/consolidated.safetensors": b"other weights",
}
WANTED = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
AT_ONCE = FetchOptions(retry=RetryPolicy(attempts=3, longest_s=0.0), silence_s=0.3)
"""Retries without a pause, and soon."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    for name in ("HF_TOKEN", "LLMSERVICE_SECRET"):
        monkeypatch.delenv(name, raising=False)
    with ModelHub(FILES).serving() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.delenv("LLMSERVICE_SECRET", raising=False)
    with ObjectStore({f"llms/tiny/{name}": content for name, content in FILES.items()}).serving() as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        monkeypatch.setenv("AWS_REGION", running.region)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3-secret")
        yield running


@pytest.fixture
def fetched(tmp_path: Path) -> Callable[[str], dict[str, bytes]]:
    """Fetch into `tmp_path/model` without pauses; the visible files that are there then."""

    def run(uri: str) -> dict[str, bytes]:
        fetch(uri, tmp_path / "model", AT_ONCE)
        found = (tmp_path / "model").iterdir()
        return {path.name: path.read_bytes() for path in found if not path.name.startswith(".")}

    return run
