"""A soak test for errors and leaks: minutes of 500 concurrent streams, of which a third is cut at random.

A toy Llama is served on loopback. Every ten seconds a row: ended streams, tokens/s, memory of the server's processes.
It fails, also by the exit status, if a stream that was not cut had an error, a block is still held, or memory grew by
more than `--most-growth` MiB after the first quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import aiohttp

from llmservice_bench.models import MODEL, ToyServer, serving
from llmservice_bench.report import machine
from llmservice_bench.results import Check, Results
from llmservice_bench.soak import SoakConfig, SoakCounts, resident_bytes, soak

ROW_S = 10.0
IDLE_S = 10.0
MIB = 1 << 20
FLAGS = ("--kv-cache-memory", "64MiB")  # on a CPU, memory is used as the cache fills; a small one is full soon


async def run(minutes: float, streams: int, most_growth: int) -> int:
    where = machine()
    print(f"{where['platform']}, {where['cpus']} CPUs: {streams} streams, a third of them cut, {minutes:g} minutes")
    async with serving(*FLAGS, "--max-queued-requests", str(2 * streams)) as server:
        rows, counts = await _load(server, minutes * 60, streams)
        held = await _held_when_idle(server)
    settled = rows[len(rows) // 4 :]
    growth = (settled[-1]["memory_mib"] - settled[0]["memory_mib"]) if settled else 0.0
    checks = [
        Check("soak: streams that broke", "= 0", len(counts.errors)),
        Check("soak: blocks still held when idle", "= 0", held),
        Check("soak: growth of the memory after the first quarter", f"<= {most_growth}", growth, "MiB"),
    ]
    notes = [f"a stream broke: {counts.errors[0]}"] if counts.errors else []
    print(*(check.line() for check in checks), *notes, sep="\n")
    settings = {"streams": streams, "minutes": minutes, "finished": counts.finished, "cut": counts.cut}
    Results("soak", rows, checks, settings, notes).write()
    return 0 if all(check.met for check in checks) else 1


async def _load(server: ToyServer, seconds: float, streams: int) -> tuple[list[dict[str, float]], SoakCounts]:
    started = time.monotonic()
    rows: list[dict[str, float]] = []
    print(f"{'s':>6} {'finished':>9} {'cut':>7} {'errors':>7} {'tokens/s':>9} {'MiB':>8}")

    def is_over(counts: SoakCounts) -> bool:
        elapsed = time.monotonic() - started
        if elapsed >= ROW_S * (len(rows) + 1):
            memory_mib = resident_bytes(server.process_id) / MIB
            rows.append({"elapsed_s": elapsed, "tokens": counts.tokens, "memory_mib": memory_mib})
            print(
                f"{elapsed:6.0f} {counts.finished:9d} {counts.cut:7d} {len(counts.errors):7d} "
                f"{counts.tokens / elapsed:9.0f} {memory_mib:8.1f}",
                flush=True,
            )
        return elapsed >= seconds

    counts = await soak(SoakConfig(url=server.url, model=MODEL, streams=streams), is_over)
    return rows, counts


async def _held_when_idle(server: ToyServer) -> float:
    """Blocks held after all requests have ended."""
    deadline = time.monotonic() + IDLE_S
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(server.metrics_url) as response:
                text = await response.text()
            held = next(float(line.split()[-1]) for line in text.splitlines() if 'blocks{state="held"}' in line)
            if held == 0 or time.monotonic() > deadline:
                return held
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--most-growth", type=int, default=32, metavar="MIB")
    arguments = parser.parse_args()
    if arguments.minutes * 60 < 3 * ROW_S:
        parser.error(f"memory is compared over several times {ROW_S:g} s: give at least {3 * ROW_S / 60:g} minutes")
    raise SystemExit(asyncio.run(run(arguments.minutes, arguments.streams, arguments.most_growth)))
