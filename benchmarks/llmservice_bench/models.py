"""The benchmarks' checkpoints, with random weights, and a server of one of them on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

FOLDER = Path(tempfile.gettempdir()) / "llmservice-bench"


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Llama with untied embeddings; its intermediate size is 8/3 of the hidden size."""

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
"""`small` has 125 M parameters, intermediate size 2048 and head dimension 64; `toy` takes almost no time per step."""

LLAMA_3_8B = {
    "layers": 32,
    "heads": 32,
    "kvHeads": 8,
    "headDim": 128,
    "hiddenSize": 4096,
    "intermediateSize": 14336,
    "vocabSize": 128256,
    "maxPositionEmbeddings": 8192,
}
"""A real model's figures, as in `spec.model.shape`: for what is planned and simulated, and needs no weights."""


def checkpoint(name: str, dtype: str = "float32", folder: Path = FOLDER) -> Path:
    """The folder of the model of that shape, in Hugging Face's format; written on the first call on this machine.

    The name of a complete folder contains a hash of the shape and of the code that writes it.

    Raises:
        KeyError: no shape has that name.
        ValueError: `dtype` is not float32, bfloat16 or float16.
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
        except OSError:  # another process has written it
            shutil.rmtree(part)
    return finished


LLMSERVICE = str(Path(sys.executable).with_name("llmservice"))
MODEL = "toy"
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ToyServer:
    """A running server."""

    url: str
    metrics_url: str
    process_id: int


@asynccontextmanager
async def serving(*flags: str) -> AsyncIterator[ToyServer]:
    """A server of the toy model with additional `flags` of `llmservice serve`; it ends with the block."""
    model = await asyncio.to_thread(checkpoint, MODEL)
    command = (
        LLMSERVICE, "serve", "--model", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", "0",
        "--metrics-port", "0", "--kv-cache-memory", "512MiB", *flags,
    )  # fmt: skip
    async with started(*command) as server:
        yield server


@asynccontextmanager
async def started(*command: str, environment: Mapping[str, str] | None = None) -> AsyncIterator[ToyServer]:
    """The server started by `command`, which logs its ports as `llmservice serve` does; it ends with the block.

    `environment` is added to this process's.
    """
    server = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=os.environ | (environment or {})
    )
    ports: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(_read_log(server, ports))
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            port, metrics_port = await ports
            await _ready(f"http://127.0.0.1:{port}")
        yield ToyServer(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics", server.pid)
    finally:
        if server.returncode is None:
            server.terminate()
        await server.wait()
        await reading


async def _read_log(server: asyncio.subprocess.Process, ports: asyncio.Future[tuple[int, int]]) -> None:
    """Read the log to its end, and the ports of the API and of /metrics from it: SystemExit where it has none."""
    assert server.stdout is not None  # noqa: S101 - the process has a pipe
    async for line in server.stdout:
        found = re.search(rb'"message":"listening".*"port":(\d+),"metrics_port":(\d+)', line)
        if found and not ports.done():
            ports.set_result((int(found[1]), int(found[2])))
    if not ports.done():
        ports.set_exception(SystemExit(f"the server ended with status {await server.wait()}"))


async def _ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)
