"""The checkpoints that are measured: random weights in real shapes, for what weights say does not change the speed."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / "llmservice-bench"


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama with untied embeddings; its inner size is 8/3 of the hidden one."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    vocab_size: int
    max_position_embeddings: int = 2048


SHAPES = {
    "toy": Shape(layers=4, hidden_size=256, heads=8, kv_heads=4, vocab_size=1024),
    "small": Shape(layers=12, hidden_size=768, heads=12, kv_heads=4, vocab_size=32_000),
}
"""`small` has 125 M parameters, an inner size of 2048 and heads of 64; `toy` is small enough to measure all but it."""


def checkpoint(name: str, dtype: str = "float32", folder: Path = FOLDER) -> Path:
    """The folder of the model of that shape, in Hugging Face's format; written on the first call of this machine.

    A later call, by another process as well, finds it there: what shape and writer are is part of the folder's name,
    and it gets that name once it is complete.

    Raises:
        KeyError: no shape has that name.
        ValueError: `dtype` is none of float32, bfloat16 and float16.
    """
    from llmservice_server.tiny import model as tiny

    spec = tiny.TinyModelSpec(**asdict(SHAPES[name]), dtype=dtype)
    digest = hashlib.sha256(repr(spec).encode() + Path(tiny.__file__).read_bytes()).hexdigest()[:12]
    finished = folder / f"{name}-{dtype}-{digest}"
    if not finished.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{finished.name}-", dir=folder))
        tiny.write_tiny_model(part, spec)
        try:
            part.rename(finished)
        except OSError:  # somebody else's was ready first
            shutil.rmtree(part)
    return finished
