"""The files of a checkpoint, and a hub and a store on the loopback that hold them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.stores.model_hub import ModelHub
from harness.stores.object_store import ObjectStore
from llmservice_server.fetch.checkpoint import fetch
from llmservice_server.fetch.download import FetchOptions

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
WITHOUT_PAUSES = FetchOptions(attempts=3, longest_wait_s=0.0, silence_s=0.3)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    for name in ("HF_TOKEN", "LLMSERVICE_SECRET"):
        monkeypatch.delenv(name, raising=False)
    with ModelHub(FILES).serving() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


@pytest.fixture
def no_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without credentials, where instance metadata refuses the connection."""
    for name in os.environ:
        if name.startswith("AWS_") or name in {"LLMSERVICE_SECRET", "SSL_CERT_FILE"}:
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def store(no_aws: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with ObjectStore({f"llms/tiny/{name}": content for name, content in FILES.items()}).serving() as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        monkeypatch.setenv("AWS_REGION", running.region)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3-secret")
        yield running


@pytest.fixture
def fetched(tmp_path: Path) -> Callable[[str], dict[str, bytes]]:
    """Fetch into `tmp_path/model` without pauses between attempts; returns the visible files."""

    def run(uri: str) -> dict[str, bytes]:
        fetch(uri, tmp_path / "model", WITHOUT_PAUSES)
        found = (tmp_path / "model").iterdir()
        return {path.name: path.read_bytes() for path in found if not path.name.startswith(".")}

    return run
