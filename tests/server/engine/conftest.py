from __future__ import annotations

from pathlib import Path

import pytest

from harness.engine_driver import VOCAB
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose block takes 2 * 2 * 16 * 2 * 8 * 4 bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    spec = TinyModelSpec(layers=2, hidden_size=32, heads=4, kv_heads=2, vocab_size=VOCAB, max_position_embeddings=256)
    write_tiny_model(folder, spec)
    return folder
