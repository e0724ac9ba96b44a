"""The gateway: what it adds to a direct connection, and what cache-aware routing gains over the least load.

`proxy`: 200 streams from pods that respond at once, directly, through nginx as a plain proxy with one worker, and
through one gateway process, by turns. At a slow pace the difference in TTFT is what the proxy adds; at a fast one the
events per second show what one process passes on. Clients, pods and proxy share the machine's cores.
`affinity`: 50 conversations of 8 turns with shared system prompts over four pods, whose engines are real but for a
model that only takes time: prefixes found in the cache, load of the pods, TTFT and tokens per second of
`prefixAffinity` and `leastLoad`, and of a single pod that holds all prefixes.

    python benchmarks/gateway.py [--only proxy|affinity]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from llmservice_bench.results import Check, Results
from pieces.conversations import measure_conversations
from pieces.gateway_fleet import Front, cluster, nginx, stream_pods

CLIENTS = str(Path(__file__).with_name("stream_clients.py"))
NUM_STREAMS, NUM_PODS = 200, 4
SLOW_S, FAST_S = 0.05, 0.01
ROUNDS, SECONDS = 3, 6.0
MEAN_TOKENS = {SLOW_S: 32, FAST_S: 128}
MODEL = "stub"


async def measure_proxy() -> tuple[list[dict[str, Any]], list[Check]]:
    """Rows of each way and pace, medians over the rounds; and the targets."""
    rows: dict[tuple[float, str], list[dict[str, Any]]] = {}
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(cluster())
        for period_s in (SLOW_S, FAST_S):
            async with AsyncExitStack() as pace:
                ports = await pace.enter_async_context(stream_pods(NUM_PODS, period_s))
                name = f"{MODEL}-{int(period_s * 1000)}ms"
                await api.add_service(name, ports, NUM_STREAMS, None)
                front = await pace.enter_async_context(api.gateway())
                plain = await pace.enter_async_context(nginx(ports, api.folder))
                ways: dict[str, Front | None] = {"direct": None, "nginx": plain, "gateway": front}
                for _ in range(ROUNDS):
                    for way, process in ways.items():
                        urls = [process.url] if process else [f"http://127.0.0.1:{port}" for port in ports]
                        row = await _run(urls, name, process, MEAN_TOKENS[period_s])
                        rows.setdefault((period_s, way), []).append(row)
    found = {key: {column: median(row[column] for row in each) for column in each[0]} for key, each in rows.items()}
    table = [
        {"way": way, "offered_events_per_s": NUM_STREAMS / period_s, **figures}
        for (period_s, way), figures in found.items()
    ]
    direct, slow, fast = found[SLOW_S, "direct"], found[SLOW_S, "gateway"], found[FAST_S, "gateway"]
    checks = [
        Check(
            "gateway, 200 streams: TTFT p50 above a direct one",
            "<= 2",
            slow["ttft_p50_ms"] - direct["ttft_p50_ms"],
            "ms",
        ),
        Check(
            "gateway, 200 streams: TTFT p99 above a direct one",
            "<= 10",
            slow["ttft_p99_ms"] - direct["ttft_p99_ms"],
            "ms",
        ),
        Check("gateway, one process: streamed events/s", ">= 10000", fast["events_per_s"]),
    ]
    return table, checks


async def _run(urls: Sequence[str], model: str, front: Front | None, mean_tokens: int) -> dict[str, Any]:
    """The clients' figures, and the cores that `front` used meanwhile."""
    clients = await asyncio.create_subprocess_exec(
        *(sys.executable, CLIENTS, ",".join(url.removeprefix("http://") for url in urls), model),
        *(str(each) for each in (NUM_STREAMS, SECONDS, mean_tokens)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert clients.stdout is not None  # noqa: S101 - the process has a pipe
    await clients.stdout.readline()
    before = front.cpu_s() if front else 0.0
    line = await clients.stdout.readline()
    used_s = front.cpu_s() - before if front else 0.0
    if await clients.wait():
        raise SystemExit("the clients failed: see above")
    figures = json.loads(line)
    events_per_s = figures["output_tokens_per_s"] * figures["events_per_token"]
    return {
        "events_per_s": events_per_s,
        **{name: figures[name] for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")},
        "proxy_cores": used_s / SECONDS,
        "clients_cores": figures["clients_busy"],
    }


PARTS = {"proxy": measure_proxy, "affinity": measure_conversations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    for part in parser.parse_args().only:
        rows, checks = asyncio.run(PARTS[part]())
        Results(f"gateway_{part}", rows, checks).write()
        print("\n".join(check.line() for check in checks))


if __name__ == "__main__":
    main()
