"""Tokens a second through the HTTP path: the real HTTP process between a stub engine and clients on bare sockets."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmservice_bench.models import checkpoint
from llmservice_bench.toy_server import started
from pieces.start import children

STUB_SERVER, CLIENTS = (
    str(Path(__file__).resolve().parents[1] / name) for name in ("stub_server.py", "stream_clients.py")
)
NUM_STREAMS = 256
LONGEST_ITL_MS = 100.0
"""Of 99 % of the tokens where a pace counts as borne. The share of the offered tokens that arrives says less: a stream
that begins anew misses the steps of its TTFT, which are the more the faster the steps are."""
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class HttpRun:
    """The clients' figures at one pace, and how busy each process was: 1 is a whole core."""

    offered_tokens_per_s: float
    figures: dict[str, Any]
    http_process_busy: float
    engine_busy: float

    @property
    def is_borne(self) -> bool:
        return bool(self.figures["itl_p99_ms"] <= LONGEST_ITL_MS)

    @property
    def row(self) -> dict[str, Any]:
        return {
            "offered_tokens_per_s": self.offered_tokens_per_s,
            **self.figures,
            "http_process_busy": self.http_process_busy,
            "engine_busy": self.engine_busy,
            "tokens_per_core_second": self.figures["output_tokens_per_s"] / self.http_process_busy,
        }


async def measure_http(num_streams: int, period_s: float, seconds: float) -> HttpRun:
    """`num_streams` at once, from an engine that gives each a token every `period_s`."""
    model = str(checkpoint("toy"))
    async with started(sys.executable, STUB_SERVER, model, str(period_s), str(num_streams)) as server:
        engine_id = children(server.process_id)[0]
        clients = await asyncio.create_subprocess_exec(
            *(sys.executable, CLIENTS, server.url.removeprefix("http://"), "stub", str(num_streams), str(seconds)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert clients.stdout is not None  # noqa: S101  # asked for above
        await clients.stdout.readline()
        before = _cpu_s(server.process_id), _cpu_s(engine_id)
        line = await clients.stdout.readline()
        after = _cpu_s(server.process_id), _cpu_s(engine_id)
        if await clients.wait():
            raise SystemExit("the clients failed: see above")
    http_s, engine_s = (end - begin for begin, end in zip(before, after, strict=True))
    return HttpRun(num_streams / period_s, json.loads(line), http_s / seconds, engine_s / seconds)


def _cpu_s(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def sustained_tokens_per_s(runs: Sequence[HttpRun]) -> float:
    """The most that arrived where tokens came evenly; 0 where they did at no pace."""
    return max((run.figures["output_tokens_per_s"] for run in runs if run.is_borne), default=0.0)
