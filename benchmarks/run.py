"""`make bench`: how throughput and latency of this machine go together, from an idle server to a flooded one.

A tiny Llama is served on loopback; a closed loop of growing concurrency finds what the server can deliver, then an open
loop of Poisson arrivals is sent at shares of that. Waits explode as the load nears 100 %: that is what the table shows.
Every row has throughput and latency; JSON with all figures and the machine's name goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from llmservice_bench.client import Target, measure_word_rate
from llmservice_bench.drive import Load, drive, open_session
from llmservice_bench.lengths import read_trace
from llmservice_bench.report import Report, machine
from llmservice_bench.tiny_server import MODEL, serving

RESULTS = Path(__file__).with_name("results")
CONCURRENCIES = (1, 4, 16, 64)
SHARES = (0.5, 0.8, 0.95)
"""Of the highest request throughput that the closed loops found."""


async def measure(url: str, scale: float, seconds: float) -> list[dict[str, Any]]:
    """One row a load, printed as it is measured."""
    target = Target(url, MODEL)
    lengths = [each.scaled(scale) for each in read_trace()]
    rows: list[dict[str, Any]] = []
    async with open_session() as session:
        word_rate = await measure_word_rate(session, target, np.random.default_rng(0))
        print(HEADER)

        async def row(name: str, **load: Any) -> Report:
            report = Report.of(await drive(session, target, Load(lengths, duration_s=seconds, **load), word_rate))
            print(_line(name, report))
            rows.append({"load": name, **load, **asdict(report)})
            return report

        await drive(session, target, Load(lengths, max_concurrency=4, num_requests=16), word_rate)  # warm up
        closed = [await row(f"{number} at once", max_concurrency=number) for number in CONCURRENCIES]
        capacity = max(report.requests_per_s for report in closed)
        for share in SHARES:
            await row(f"{share:.0%} of the most", rate=share * capacity)
    return rows


HEADER = f"{'load':<18}{'req/s':>8}{'out tok/s':>11}" + "".join(
    f"{f'{name} p50/p99 ms':>22}" for name in ("TTFT", "ITL", "E2E")
)


def _line(name: str, report: Report) -> str:
    latencies = "".join(
        f"{f'{values.p50 * 1000:.1f} / {values.p99 * 1000:.1f}':>22}"
        for values in (report.ttft_s, report.itl_s, report.e2e_s)
    )
    failed = f"  {report.failed} failed" if report.failed else ""
    return f"{name:<18}{report.requests_per_s:>8.1f}{report.output_tokens_per_s:>11.0f}{latencies}{failed}"


async def run(scale: float, seconds: float) -> int:
    where = machine()
    print(
        f"tiny Llama, lengths of the Azure conversation trace × {scale:g}, on {where['platform']}, {where['cpus']} CPUs"
    )
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder)) as server:
            rows = await measure(server.url, scale, seconds)
    RESULTS.mkdir(exist_ok=True)
    written = RESULTS / "serve.json"
    written.write_text(json.dumps({"machine": where, "scale": scale, "rows": rows}, indent=2), encoding="utf-8")
    print(f"written: {written}")
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.25, help="multiply the trace's lengths by this")
    parser.add_argument("--seconds", type=float, default=10.0, help="a load")
    arguments = parser.parse_args()
    raise SystemExit(asyncio.run(run(arguments.scale, arguments.seconds)))
