"""The HTTP process's side of the engine: real sockets to a real process, whose engine computes nothing."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from llmservice_server.engine.config import EngineConfig
from llmservice_server.ipc.client import EngineClient, OutputStream
from llmservice_server.types.messages import GenerateRequest, Ready, SamplingParams

pytestmark = pytest.mark.slow

STUB_ENGINE = str(Path(__file__).with_name("stub_engine.py"))


@asynccontextmanager
async def _started(num_requests: int = 1, **settings: Any) -> AsyncIterator[EngineClient]:
    """A client whose engine answers as soon as it has `num_requests`."""
    ready = asyncio.Event()

    def on_ready(_: Ready) -> None:
        ready.set()

    command = (sys.executable, STUB_ENGINE, str(num_requests))
    config = EngineConfig(model=Path("nowhere"))
    client = EngineClient(config, "warning", on_ready=on_ready, on_stats=lambda _: None, command=command, **settings)
    running = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(60):
            await ready.wait()
        yield client
    finally:
        await client.stop()
        await running


def _request(request_id: str, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 300, **sampling})
    return GenerateRequest(request_id=request_id, prompt_token_ids=[5, 6], sampling=params, arrival_s=0.0)


async def test_a_request_that_cannot_be_sent_leaves_nothing_behind() -> None:
    async with _started() as client:
        with pytest.raises(OverflowError):
            client.generate([_request("a"), _request("b", top_k=10**30)])
        with pytest.raises(OverflowError):
            await client.embed([[5], [2**70]])
        assert client.embedding_inputs == {}
        assert client.silent_s == 0


@pytest.mark.parametrize("num_bytes", [75, 76, 200])  # the path of a socket has room for 75 of TMPDIR
async def test_an_engine_starts_however_long_the_path_of_the_folder_for_temporary_files_is(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, parent = "12345678", "/tmp"
    name = "n" * (num_bytes - len(f"{parent}/{random}"))
    with tempfile.TemporaryDirectory(prefix=name, dir=parent) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        async with _started() as client:
            assert client.ready is not None


async def test_inputs_are_counted_by_key_from_the_call_until_they_are_withdrawn() -> None:
    async with _started() as client:
        answers = [client.embed([[5], [6]], client="alice"), client.embed([[7]])]
        assert client.embedding_inputs == {"alice": 2, None: 1}
        for answer in answers:
            answer.cancel()
        await asyncio.wait(answers)
        assert client.embedding_inputs == {}


async def _wake_ups(stream: OutputStream) -> int:
    """Until its request has ended."""
    count = 1
    while (await stream.next())[-1].finish_reason is None:
        count += 1
    return count


async def test_streams_are_woken_every_two_steps_at_least_however_many_are_queued() -> None:
    async with _started(num_requests=16) as client:
        streams = [client.generate([_request(str(number))]) for number in range(16)]
        async with asyncio.timeout(60):
            wake_ups = await asyncio.gather(*map(_wake_ups, streams))
    assert min(wake_ups) >= 150
