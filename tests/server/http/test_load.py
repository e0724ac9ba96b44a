"""Full load, and then the worst: streams cut by the hundred, SIGTERM, the engine killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from llmservice_bench.soak import SoakConfig, resident_bytes, soak

NO_TIMEOUT = aiohttp.ClientTimeout(total=100)


def _ask(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": True} | changes


def _arrived(server: Any) -> float:
    """Never too many: who moves on while this looks is seen where it was or not at all."""
    finished = server.metric("llmservice_request_success_total", finished_reason="length")
    running = server.metric("llmservice_num_requests_running")
    return float(finished + running + server.metric("llmservice_num_requests_waiting", lane="interactive"))


@dataclass
class Outcome:
    """What one client saw."""

    started_s: float
    status: int = 0
    slots: str | None = None
    events: list[str] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def finished(self) -> bool:
        return self.status == 200 and bool(self.events) and self.events[-1] == "[DONE]"

    @property
    def error(self) -> dict[str, Any] | None:
        """OpenAI's error object, whether the status or an event brought it."""
        last = json.loads(self.events[-1]) if self.events and self.events[-1].startswith("{") else {}
        error: dict[str, Any] | None = last.get("error")
        return error


async def _send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Outcome:
    outcome = Outcome(time.monotonic())
    async with session.post(url, json=body) as response:
        outcome.status = response.status
        outcome.slots = response.headers.get("x-admissible-sequences")
        async for line in response.content:
            if text := line.decode().strip().removeprefix("data: "):
                outcome.events.append(text)
    outcome.ended_s = time.monotonic()
    return outcome


def _child(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()[0])


async def test_five_hundred_streams_a_third_of_them_cut(start_server: Callable[..., Any]) -> None:
    server = start_server("--max-queued-requests", "1000", "--max-num-seqs", "64").wait_until_ready()
    config = SoakConfig(url=server.url, model="tiny", streams=500)
    memory = []
    total = cut = finished = 0
    for round_ in range(3):
        counts = await soak(config, lambda counts: counts.finished + counts.cut >= 300)
        assert counts.errors == [], round_
        await asyncio.to_thread(server.wait_until_idle)
        memory.append(resident_bytes(server.process.pid))
        total, cut, finished = total + counts.finished + counts.cut, cut + counts.cut, finished + counts.finished
    assert cut > total / 5
    assert memory[2] - memory[1] < 16 * 2**20  # after two rounds every pool and cache has the size it needs
    ended = {
        reason: server.metric("llmservice_request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert sum(ended.values()) == total
    assert ended["stop"] == ended["error"] == 0
    assert finished <= ended["length"] <= total  # some had ended before their cut was noticed
    assert ended["abort"] > 0  # how many depends on the client's pace; the next test counts them
    assert not [line for line in server.log if line["level"] in ("warning", "error")]


async def test_every_stream_cut_while_it_runs_ends_as_an_abort_and_no_other_does(
    start_server: Callable[..., Any],
) -> None:
    """The engine is stopped while the cuts are made, so that no stream can end before its cut is noticed."""
    server = start_server("--max-num-seqs", "48", "--stuck-timeout", "60").wait_until_ready()
    engine = _child(server.process.pid)

    def ended(reason: str) -> float:
        return server.metric("llmservice_request_success_total", finished_reason=reason)

    async with aiohttp.ClientSession(timeout=NO_TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session:
        url = f"{server.url}/v1/completions"
        streams = [asyncio.create_task(_send(session, url, _ask(max_tokens=480))) for _ in range(48)]
        await asyncio.to_thread(server.wait_for, lambda: server.metric("llmservice_num_requests_running") == 48 or None)
        os.kill(engine, signal.SIGSTOP)
        try:
            while sum(stream.done() for stream in streams) < await asyncio.to_thread(ended, "length"):
                await asyncio.sleep(0.01)
            cut = [stream for stream in streams if not stream.done()][::3]
            for stream in cut:
                stream.cancel()
            await asyncio.to_thread(server.wait_for, lambda: ended("abort") == len(cut) or None)
        finally:
            os.kill(engine, signal.SIGCONT)
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
    assert len(cut) > 0
    finished = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
    assert len(finished) == len(streams) - len(cut)
    assert all(outcome.finished for outcome in finished)
    assert all(outcome.slots for outcome in finished)  # though all arrived before the first step
    await asyncio.to_thread(server.wait_until_idle)
    assert (ended("abort"), ended("length")) == (len(cut), len(finished))


async def test_at_sigterm_every_admitted_request_finishes_and_no_later_one_is_admitted(
    start_server: Callable[..., Any],
) -> None:
    server = start_server("--max-num-seqs", "32", "--drain-timeout", "100").wait_until_ready()
    outcomes: list[Outcome] = []
    unready_s: float | None = None

    async def client(session: aiohttp.ClientSession) -> None:
        while unready_s is None:
            outcomes.append(await _send(session, f"{server.url}/v1/completions", _ask(max_tokens=60)))

    async with aiohttp.ClientSession(timeout=NO_TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [asyncio.create_task(client(session)) for _ in range(128)]
        while len(outcomes) < 40:
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        signalled_s = time.monotonic()
        while unready_s is None:
            async with session.get(f"{server.url}/ready") as response:
                if response.status == 503:
                    unready_s = time.monotonic()
        late = await _send(session, f"{server.url}/v1/completions", _ask())
        async with session.get(f"{server.url}/ready") as response:
            assert response.status == 503
        await asyncio.gather(*clients)
    assert await asyncio.to_thread(server.wait_for_exit) == 0
    assert unready_s - signalled_s < 1
    assert late.status == 503
    admitted = [outcome for outcome in outcomes if outcome.status == 200]
    assert all(outcome.finished for outcome in admitted)
    assert len(admitted) >= 128  # those that ran and waited when the signal came, and those before
    assert {outcome.status for outcome in outcomes} <= {200, 503}
    assert not [line for line in server.log if line["level"] in ("warning", "error")]
    assert server.errors == []


async def test_when_the_engine_is_killed_everybody_hears_of_it_within_a_second(
    start_server: Callable[..., Any],
) -> None:
    server = start_server("--max-num-seqs", "8").wait_until_ready()
    engine = _child(server.process.pid)
    async with aiohttp.ClientSession(timeout=NO_TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session:
        kinds = [_ask(max_tokens=480), _ask(max_tokens=480, stream=False)] * 36
        waiting = [asyncio.create_task(_send(session, f"{server.url}/v1/completions", kind)) for kind in kinds]
        body = {"model": "tiny", "input": ["a " * 200] * 500}
        waiting += [asyncio.create_task(_send(session, f"{server.url}/v1/embeddings", body)) for _ in range(4)]
        await asyncio.to_thread(
            server.wait_for, lambda: server.metric("llmservice_num_requests_waiting", lane="interactive") > 40 or None
        )
        os.kill(engine, signal.SIGSTOP)  # so that what it has finished can be told from what it has not
        completions, before = waiting[: len(kinds)], (-1, -1.0, -1.0)
        while True:  # until the server has passed on all that the engine had sent, and the clients have read it
            tokens = await asyncio.to_thread(server.metric, "llmservice_generation_tokens_total")
            ended = await asyncio.to_thread(server.metric, "llmservice_request_success_total", finished_reason="length")
            now = (sum(task.done() for task in completions), tokens, ended)
            if now == before and now[0] == ended:
                break
            before = now
            await asyncio.sleep(0.1)
        unfinished = [task for task in waiting if not task.done()]
        os.kill(engine, signal.SIGKILL)
        killed_s = time.monotonic()
        outcomes = await asyncio.gather(*waiting)
    assert await asyncio.to_thread(server.wait_for_exit) == 3
    broken = [outcome for outcome in outcomes if outcome.error is not None]
    assert len(unfinished) > 40  # so many waited
    assert len(broken) == len(unfinished)
    for outcome in broken:
        assert outcome.ended_s - killed_s < 1
        assert "killed by SIGKILL" in str(outcome.error)
    assert all(outcome.finished or outcome.ended_s < killed_s for outcome in outcomes if outcome.error is None)


async def test_the_time_to_first_token_is_counted_for_exactly_those_that_produced_one(
    start_server: Callable[..., Any],
) -> None:
    server = start_server("--max-num-seqs", "2", "--max-queued-requests", "300").wait_until_ready()
    async with aiohttp.ClientSession(timeout=NO_TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as session:
        url = f"{server.url}/v1/completions"
        long = [asyncio.create_task(_send(session, url, _ask(max_tokens=400))) for _ in range(12)]  # two at a time
        await asyncio.to_thread(server.wait_for, lambda: server.metric("llmservice_num_requests_running") == 2 or None)
        queued = [asyncio.create_task(_send(session, url, _ask(n=choices))) for choices in (1, 3) * 10]
        await asyncio.to_thread(server.wait_for, lambda: _arrived(server) == 12 + 10 * (1 + 3) or None)
        for task in queued:  # they leave before their first token
            task.cancel()
        await asyncio.gather(*queued, return_exceptions=True)
        short = await asyncio.gather(*(_send(session, url, _ask(max_tokens=3, stream=False)) for _ in range(30)))
        assert all(outcome.finished for outcome in await asyncio.gather(*long))
    assert {outcome.status for outcome in short} == {200}
    await asyncio.to_thread(server.wait_until_idle)
    assert server.metric("llmservice_time_to_first_token_seconds_count") == 42
    assert server.metric("llmservice_request_queue_time_seconds_count") == 42
    assert server.metric("llmservice_e2e_request_latency_seconds_count") == 42
    assert server.metric("llmservice_request_success_total", finished_reason="length") == 42
    assert server.metric("llmservice_request_success_total", finished_reason="abort") == 10 * (1 + 3)
    assert server.metric("llmservice_inter_token_latency_seconds_count") == 12 * 399 + 30 * 2
    assert server.metric("llmservice_generation_tokens_total") == 12 * 400 + 30 * 3
