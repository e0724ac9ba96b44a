"""Start-up until the first token: phases in one process, the total over HTTP, and the memory used then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from llmservice_bench.client import Target
from llmservice_bench.models import LLMSERVICE, checkpoint, started

COLD_START = str(Path(__file__).resolve().parents[1] / "cold_start.py")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20


def measure_phases(model: str, runs: int = 3, kernels: Path | None = None) -> dict[str, float]:
    """Medians over new processes, with files in the page cache and compiled kernels in their cache or in `kernels`.

    An empty folder `kernels` measures the first start of a pod.
    """
    command = [sys.executable, COLD_START, str(checkpoint(model))]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(kernels)} if kernels else None
    found = [json.loads(subprocess.check_output(command, env=environment)) for _ in range(runs)]  # noqa: S603 - ours
    return {phase: median(run[phase] for run in found) for phase in found[0]}


async def measure_serving(model: str) -> dict[str, Any]:
    """Seconds from `llmservice serve` to ready and to the first token, and the memory of both processes then."""
    command = (LLMSERVICE, "serve", "--model", str(checkpoint(model)), "--host", "127.0.0.1", "--port", "0")
    flags = ("--metrics-port", "0", "--served-model-name", model, "--kv-cache-memory", "256MiB")
    begun_s = time.perf_counter()
    async with started(*command, *flags) as server:
        ready_s = time.perf_counter() - begun_s
        target = Target(server.url, model)
        body = target.body("Say", max_tokens=1)
        async with aiohttp.ClientSession() as session, session.post(target.endpoint, json=body) as response:
            await response.read()
        first_token_s = time.perf_counter() - begun_s
        http, engine = resident_mib(server.process_id), resident_mib(children(server.process_id)[0])
    return {
        "ready_s": ready_s,
        "first_token_over_http_s": first_token_s,
        "http_process_mib": http,
        "engine_process_mib": engine,
    }


def resident_mib(process_id: int) -> float:
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * _PAGE_BYTES / _MIB


def children(process_id: int) -> list[int]:
    tasks = Path(f"/proc/{process_id}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
