"""The operator with 1,000 LLMServices: requests and writes without changes, reaction time, memory.

All services are autoscaled and have one ready pod that is scraped in every pass; fake_fleet.py describes what is
simulated. Four rounds: single spec changes, a hundred changes at once, a restart of the operator without changes, and,
with two replicas, the loss of the leader by SIGTERM and by SIGKILL. The results are in
benchmarks/results/operator_scale.json (operator_scale_kube-apiserver.json with KUBEBUILDER_ASSETS).

    python benchmarks/operator_scale.py                              1,000 services, ten minutes at most
    python benchmarks/operator_scale.py --services 100 --steady 20   a quick run, whose results are not kept
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from fake_fleet import FakeFleet, api_server, beside
from llmservice_bench.report import machine
from llmservice_bench.results import Check, Results
from llmservice_local.client import DEFINITIONS, NAMESPACES, KubeClient, connect
from llmservice_local.loopback import free_port
from llmservice_operator.api.crd import crd
from llmservice_planner.traffic.lengths import percentile
from pieces.gateway_fleet import SERVICES, is_served

SERVICE_COUNT, NAMESPACE_COUNT = 1000, 10
SHAPE = {"layers": 2, "heads": 4, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}
SPEC: dict[str, Any] = {
    "model": {"uri": "hf://org/name", "shape": SHAPE},
    "resources": {"gpu": {"count": 0}, "requests": {"cpu": "1", "memory": "4Gi"}},
    "engine": {"maxModelLen": 512, "maxNumSeqs": 8},
    "slo": {"ttftP99": "2s"},
    "autoscaling": {"minReplicas": 1, "maxReplicas": 4},
}
WRITES = frozenset({"create", "update", "patch", "delete"})
LIMIT_S = 600.0
LEASE_S = 30.0
AFTERMATH_S = 20.0
"""Longer than a restarted operator delays its status writes."""


@dataclass
class Operator:
    """An operator process, with figures from its /metrics."""

    process: asyncio.subprocess.Process
    port: int
    session: aiohttp.ClientSession
    started_s: float = field(default_factory=time.monotonic)

    async def samples(self) -> list[tuple[str, dict[str, str], float]]:
        try:
            async with self.session.get(f"http://127.0.0.1:{self.port}/metrics") as response:
                text = await response.text()
        except aiohttp.ClientError:
            return []
        families = text_string_to_metric_families(text)
        return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    async def calls(self) -> dict[str, float]:
        """Requests to the API server so far, without those for the Lease."""
        counted = {"reads": 0.0, "writes": 0.0}
        for name, labels, value in await self.samples():
            if name == "llmservice_operator_api_requests_total" and labels["resource"] != "leases":
                counted["writes" if labels["verb"] in WRITES else "reads"] += value
        return counted

    async def lease_calls(self) -> float:
        """Requests for the Lease so far."""
        wanted = "llmservice_operator_api_requests_total"
        return sum(
            value for name, labels, value in await self.samples() if name == wanted and labels["resource"] == "leases"
        )

    async def value(self, wanted: str) -> float:
        return sum(value for name, _, value in await self.samples() if name == wanted)

    def memory_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@dataclass
class Bench:
    """The measurements, which are printed immediately."""

    client: KubeClient
    fleet: FakeFleet
    kubeconfig: Path
    folder: Path
    session: aiohttp.ClientSession
    count: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def note(self, name: str, value: float, text: str, bound: str = "") -> None:
        """Add a row; with a bound (as of `Check`) it is also a target."""
        self.rows.append({"name": name, "what": text, "value": value})
        if bound:
            self.checks.append(Check(f"operator, {self.count} services: {text}", bound, value))
        verdict = f"{bound}: {'met' if self.checks[-1].met else 'MISSED'}" if bound else ""
        print(f"{text:<72}{value:>12,.2f}  {verdict}", flush=True)

    def names(self) -> list[tuple[str, str]]:
        return [(f"team-{number % NAMESPACE_COUNT}", f"model-{number}") for number in range(self.count)]

    @asynccontextmanager
    async def operator(self, *flags: str) -> AsyncIterator[Operator]:
        """Start an operator, which is killed at the end of the block if it still runs."""
        port = free_port()
        command = ["operator", "--host", "127.0.0.1", "--port", str(port), "--server-image", "img:1"]
        command += ["--health-port", str(free_port())]
        command += ["--hf-endpoint", "http://127.0.0.1:9", "--log-level", "warning", *flags]
        with (self.folder / f"operator-{port}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "llmservice_planner", *command, env=self._environment(), stderr=log
            )
        try:
            yield Operator(process, port, self.session)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _environment(self) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "KUBECONFIG": str(self.kubeconfig), "POD_NAMESPACE": "default"}

    async def change(self, key: tuple[str, str], slots: int) -> float:
        """Change one service's spec; seconds until its Deployment has the change."""
        moment = self.fleet.expect(key, f"--max-num-seqs {slots} ")
        sent_s = time.monotonic()
        metadata = {"namespace": key[0], "name": key[1]}
        await self.client.merge(SERVICES, {"metadata": metadata}, {"spec": {"engine": {"maxNumSeqs": slots}}})
        async with asyncio.timeout(60):
            return await moment - sent_s

    async def quiet(self, operator: Operator, still_s: float = 15.0) -> None:
        """Wait until the operator has written nothing for a while."""
        writes, since_s = -1.0, time.monotonic()
        async with asyncio.timeout(LIMIT_S):
            while time.monotonic() - since_s < still_s:
                await asyncio.sleep(1)
                now = (await operator.calls())["writes"]
                if now != writes:
                    writes, since_s = now, time.monotonic()


async def prepare(bench: Bench) -> None:
    """Create the CRD, the namespaces and all services, before an operator runs."""
    await bench.client.create(DEFINITIONS, None, crd())
    for number in range(NAMESPACE_COUNT):
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"team-{number}"}}
        await bench.client.create(NAMESPACES, None, namespace)
    await until(lambda: is_served(bench.client))
    gate = asyncio.Semaphore(16)

    async def create(namespace: str, name: str) -> None:
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": SERVICES.api_version, "kind": "LLMService", "metadata": metadata, "spec": SPEC}
        async with gate:
            await bench.client.create(SERVICES, namespace, body)

    await asyncio.gather(*(create(*key) for key in bench.names()))


async def until(check: Callable[[], Awaitable[bool]], every_s: float = 0.2) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await check():  # noqa: ASYNC110 - what another process does has no event here
            await asyncio.sleep(every_s)


async def measure_first_start(bench: Bench, operator: Operator) -> None:
    async def all_there() -> bool:
        return len(bench.fleet.deployments) >= bench.count

    await until(all_there)
    bench.note("fill_s", time.monotonic() - operator.started_s, "every service has its children, s after the start")
    await bench.quiet(operator)


async def measure_steady(bench: Bench, operator: Operator, seconds: float) -> None:
    before, passes = await operator.calls(), await operator.value("llmservice_operator_pass_seconds_count")
    busy = await operator.value("llmservice_operator_process_cpu_seconds_total")
    await asyncio.sleep(seconds)
    after = await operator.calls()
    passes = await operator.value("llmservice_operator_pass_seconds_count") - passes
    busy = await operator.value("llmservice_operator_process_cpu_seconds_total") - busy
    bench.note("steady_seconds", seconds, "steady state: seconds of it")
    bench.note("steady_writes", after["writes"] - before["writes"], "steady state: writes", "= 0")
    bench.note("steady_reads", after["reads"] - before["reads"], "steady state: reads")
    bench.note("steady_passes_per_s", passes / seconds, "steady state: passes per second")
    bench.note("steady_cpu", busy / seconds, "steady state: CPUs used by the operator")
    bench.note("steady_memory_mib", operator.memory_mib(), "steady state: resident memory, MiB", "< 200")


async def measure_changes(bench: Bench, number: int) -> None:
    keys = bench.names()[:number]
    spread: list[asyncio.Task[float]] = []
    for key in keys:
        spread.append(asyncio.create_task(bench.change(key, 5)))
        await asyncio.sleep(0.2)
    note_latencies(bench, "spread", sorted(await asyncio.gather(*spread)), f"{len(keys)} changes, five a second")
    burst = await asyncio.gather(*(bench.change(key, 6) for key in keys))
    note_latencies(bench, "burst", sorted(burst), f"{len(keys)} changes at once")


def note_latencies(bench: Bench, name: str, latencies: list[float], what: str) -> None:
    target = "< 0.25" if name == "spread" else ""
    for share in (0.5, 0.99, 1.0):
        value = percentile(latencies, share)
        text = f"{what}: spec to Deployment, s, p{share * 100:g}"
        bench.note(f"{name}_p{share * 100:g}_s", value, text, target if share == 0.99 else "")


async def measure_restart(bench: Bench, operator: Operator) -> None:
    """A restart without changes: seconds until each service was reconciled, and the number of writes."""

    async def all_seen() -> bool:
        return await operator.value("llmservice_operator_pass_seconds_count") >= bench.count

    await until(all_seen, 1.0)  # /metrics of a thousand services takes 0.1 s
    took_s = time.monotonic() - operator.started_s
    bench.note("restart_s", took_s, "restart: every service looked at, s after the start", "< 30")
    busy = await operator.value("llmservice_operator_process_cpu_seconds_total")
    bench.note("restart_cpu_s", busy, "restart: CPU seconds of the operator by then")
    await asyncio.sleep(AFTERMATH_S)
    calls = await operator.calls()
    bench.note("restart_writes", calls["writes"], f"restart: writes, until {AFTERMATH_S:g} s later", "= 0")
    bench.note("restart_reads", calls["reads"], "restart: reads")
    bench.note("restart_memory_mib", operator.memory_mib(), "restart: resident memory, MiB", "< 200")


async def measure_handover(bench: Bench, name: str, number: signal.Signals, target: str) -> None:
    """With two replicas: seconds from the signal until the other one has changed a Deployment."""
    flags = ("--leader-elect", f"--lease-name={name}")
    async with bench.operator(*flags) as first:
        await until(lambda: _leads(first))
        async with bench.operator(*flags) as second:
            await until(lambda: _filled(second, bench.count))
            await bench.quiet(first, 5.0)
            if number == signal.SIGTERM:
                await measure_rest(bench, first, second)
            sent_s = time.monotonic()
            first.process.send_signal(number)
            if number == signal.SIGTERM:
                await until(lambda: _leads(second), 0.05)
                bench.note(f"{name}_lease_s", time.monotonic() - sent_s, f"{name}: s until the other leads", target)
            await bench.change(bench.names()[-1], 4 if number == signal.SIGTERM else 3)
            bench.note(f"{name}_s", time.monotonic() - sent_s, f"{name}: s until it changed a Deployment", target)


async def measure_rest(bench: Bench, *operators: Operator) -> None:
    """Requests of two replicas for the Lease without changes."""
    before = sum([await one.lease_calls() for one in operators])
    await asyncio.sleep(LEASE_S)
    calls = sum([await one.lease_calls() for one in operators]) - before
    bench.note("lease_calls_per_min", calls * 60 / LEASE_S, "two replicas at rest: Lease requests a minute", "<= 60")


async def _leads(operator: Operator) -> bool:
    return await operator.value("llmservice_operator_leader") == 1


async def _filled(operator: Operator, count: int) -> bool:
    return await operator.value("llmservice_operator_cached_objects") >= count


async def run(count: int, steady_s: float, changes: int, limit_s: float) -> int:
    """Run all rounds that fit the time limit; returns 1 if some are missing."""
    where = machine()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoint, kind = await stack.enter_async_context(api_server(folder))
        pods = await stack.enter_async_context(beside("pods"))
        print(f"{where['platform']}, {where['cpus']} CPUs; API: {kind}; {count} services; pods: {pods}\n")
        endpoint.write_kubeconfig(folder / "kubeconfig")
        client = await stack.enter_async_context(connect(endpoint, "operator-scale"))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        fleet = FakeFleet(client)
        bench = Bench(client, fleet, folder / "kubeconfig", folder, session, count)
        complete = True
        try:
            async with asyncio.timeout(limit_s):
                await rounds(bench, steady_s, min(changes, count))
        except TimeoutError:
            complete = False
            print(f"stopped: the rest was not measured within {limit_s:g} s (--limit)", file=sys.stderr)
        if count == SERVICE_COUNT:
            write_results(bench, kind, complete=complete)
    return 0 if complete else 1


async def rounds(bench: Bench, steady_s: float, changes: int) -> None:
    await prepare(bench)
    async with AsyncExitStack() as stack:
        watching = asyncio.create_task(bench.fleet.run())
        stack.callback(watching.cancel)
        async with bench.operator() as operator:
            await measure_first_start(bench, operator)
            await measure_steady(bench, operator, steady_s)
            await measure_changes(bench, changes)
            await bench.quiet(operator)
            bench.note("memory_mib", operator.memory_mib(), "resident memory after the changes, MiB", "< 200")
        async with bench.operator() as operator:
            await measure_restart(bench, operator)
        await measure_handover(bench, "clean-stop", signal.SIGTERM, "< 5")
        await measure_handover(bench, "crash", signal.SIGKILL, "< 20")


def write_results(bench: Bench, kind: str, *, complete: bool) -> None:
    settings = {"api": kind, "services": bench.count, "complete": complete, "load_average": os.getloadavg()[1]}
    name = "operator_scale" if kind == "emulator" else f"operator_scale_{kind}"
    Results(name, bench.rows, bench.checks, settings).write()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=SERVICE_COUNT)
    parser.add_argument("--steady", type=float, default=45.0, metavar="SECONDS", help="how long nothing changes")
    parser.add_argument("--changes", type=int, default=100, help="specs that change, five a second and then at once")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="stop after so long")
    options = parser.parse_args()
    gc.disable()  # as in fake_fleet.py
    sys.exit(asyncio.run(run(options.services, options.steady, options.changes, options.limit)))
