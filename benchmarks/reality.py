"""The simulator against reality: the same requests, settings and latency model in both.

`cluster`: `llmservice up`, where operator, gateway, HTTP servers, schedulers and caches are the real ones; only the
model's forward pass is replaced by a wait of the time that the latency model gives its steps (timed_engine.py), so that
ten replicas fit on two cores. The load rises and falls within minutes; its requests have the lengths of a trace. The
forecast is the median of simulations that differ in the times of the autoscaler's ticks, which decide a replica more or
less and so the slowest requests: the cluster serves the load three times, and its replicas are the median as well.
Simulations that set the replicas when the cluster did show what of the difference is not the autoscaler's.
`server`: one real server of a model of 12 layers and hidden size 768 on this CPU under a part of the trace, whose
latency model `llmservice calibrate` has fitted just before. A CPU that others share is now faster, now slower: both are
done in turn, five times, and medians are compared.

    python benchmarks/reality.py [--only cluster|server] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, median_low
from typing import Any

import numpy as np
import yaml
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config
from tokenizers import Tokenizer

from llmservice_bench.client import PROBE_WORDS, Target, WordRate, make_prompt, measure_word_rate
from llmservice_bench.drive import Load, drive, open_session
from llmservice_bench.models import LLAMA_3_8B, LLMSERVICE, SHAPES, checkpoint, started
from llmservice_bench.record import RequestRecord
from llmservice_bench.results import Check, Results
from llmservice_bench.simulation.clairvoyant import SLOT_S, Scheduled
from llmservice_bench.simulation.fleet import Fleet, FleetConfig
from llmservice_bench.simulation.observation import Policy
from llmservice_bench.simulation.policies import Service, Static, make_policy
from llmservice_bench.simulation.replica import ReplicaConfig
from llmservice_bench.simulation.service import CPU_PREFILL_TOKENS, fleet_config, latency_of
from llmservice_bench.trace import Lengths, read_trace
from llmservice_local.demo.service import apply, wait_ready
from llmservice_local.demo.up import UpProcess, run_command
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.pods.pod import epoch, pods_of
from llmservice_operator.scaling.from_manifest import sized_service
from llmservice_planner.command import CommandError
from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.model.source import read_model
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_planner.traffic.traces import TraceRequest
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.scheduler import continuous_config

SERVER = str(Path(__file__).with_name("timed_server.py"))
GPU = "a10g"
MOST_REPLICAS = 10
LOAD_S = 20.0
"""What a replica takes from the start of its process until its model is loaded: longer than its imports take while
several start on two cores, so that all start-ups are about equal."""
RUNS, SIMULATIONS = 3, 9
TICK_S = 10
IDLE_S = 30.0
"""Before the load: what the autoscaler has seen by then is part of what it decides."""
SERVER_SEQS, SERVER_RATE, SERVER_SCALE = 32, 2.0, 0.25
"""Of the real server: sequences, requests per second, and a factor of the trace's lengths."""
SERVER_RUNS, SERVER_S, SERVER_CALIBRATIONS = 5, 60.0, 3
"""Of the real server: turns, seconds of load in each, and calibrations before each at most."""
PROFILE = (
    (60.0, 2.0),
    (30.0, 3.0),
    (30.0, 4.0),
    (30.0, 5.0),
    (60.0, 6.0),
    (30.0, 5.0),
    (30.0, 4.0),
    (30.0, 3.0),
    (120.0, 2.5),
)
"""Seconds, and requests per second in them. After a jump, chance decides: from 2 to 7 a second, simulations that differ
in the times of the ticks alone are up to four replicas apart."""
QUICK = ((20.0, 1.0), (40.0, 3.0), (20.0, 1.0))
NAME, NAMESPACE = "timed", "default"


def manifest(folder: Path) -> dict[str, Any]:
    """The service. Its pods find the command of this benchmark in place of `llmservice`."""
    return {
        "apiVersion": "serving.llmservice.io/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "model": {"uri": "file:///timed"},
            "resources": {"gpu": {"product": GPU, "count": 1}, "requests": {"cpu": "1", "memory": "1Gi"}},
            "engine": {"maxModelLen": 8192},
            "slo": {"ttftP99": "3s"},
            "autoscaling": {
                "minReplicas": 1,
                "maxReplicas": MOST_REPLICAS,
                "metrics": {"source": "pods", "window": "30s"},
                "scaleDown": {"stabilization": "60s"},
            },
            "drainTimeout": "60s",
            "podTemplate": {"env": [{"name": "PATH", "value": str(folder)}]},
        },
    }


def write_model(folder: Path) -> None:
    """Give the folder of a small model the figures of an 8B model, by which the operator sizes the service."""
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    file = folder / "config.json"
    figures = {
        "num_hidden_layers": LLAMA_3_8B["layers"],
        "num_attention_heads": LLAMA_3_8B["heads"],
        "num_key_value_heads": LLAMA_3_8B["kvHeads"],
        "head_dim": LLAMA_3_8B["headDim"],
        "hidden_size": LLAMA_3_8B["hiddenSize"],
        "intermediate_size": LLAMA_3_8B["intermediateSize"],
        "vocab_size": LLAMA_3_8B["vocabSize"],
        "max_position_embeddings": LLAMA_3_8B["maxPositionEmbeddings"],
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | figures), encoding="utf-8")


def requests(profile: Sequence[tuple[float, float]], seed: int = 0) -> tuple[list[float], list[Lengths]]:
    """Poisson arrivals of the profile's rates, and lengths drawn from the bundled trace."""
    rng = np.random.default_rng(seed)
    sizes = read_trace()
    arrivals: list[float] = []
    begin_s = 0.0
    for duration_s, rate in profile:
        arrivals += sorted(rng.uniform(begin_s, begin_s + duration_s, rng.poisson(rate * duration_s)).tolist())
        begin_s += duration_s
    return arrivals, [sizes[index] for index in rng.integers(len(sizes), size=len(arrivals)).tolist()]


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision that changed the replicas, at this time since the load began."""

    time_s: float
    replicas: int
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the requests, in the cluster or in the simulation."""

    ttft_s: list[float]
    output_tokens_per_s: float
    failed: int
    replicas: list[tuple[float, int]]
    """(time, replicas that the Deployment is set to), at each change."""
    decisions: Sequence[Decided] = ()
    """Those that changed the replicas."""

    def ttft(self, percent: float) -> float:
        return float(np.percentile(self.ttft_s, percent))

    def replicas_at(self, time_s: float) -> int:
        return next((number for when, number in reversed(self.replicas) if when <= time_s), self.replicas[0][1])


@dataclass(slots=True)
class Watched:
    """What the API server shows of the service during the load; times are seconds since it began."""

    replicas: list[tuple[float, int]] = field(default_factory=list)
    decisions: dict[str, Decided] = field(default_factory=dict)
    """By the time that the operator notes."""
    startups_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By pod: since 1970, when it was created, and the time until it was ready."""

    @property
    def changes(self) -> list[Decided]:
        """The decisions that changed the replicas."""
        noted = sorted(self.decisions.values(), key=lambda each: each.time_s)
        before = [self.replicas[0][1], *(each.replicas for each in noted)]
        return [each for each, replicas in zip(noted, before, strict=False) if each.replicas != replicas]


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """The outcome in a cluster, and what a simulation of the same needs."""

    outcome: Outcome
    startups_s: tuple[float, ...]
    """Of the replicas, in the order of their creation."""
    begins_s: float
    """When the load began, since the first replica was ready."""


async def run_cluster(folder: Path, state: str, service: dict[str, Any], load: Load, word_rate: WordRate) -> ClusterRun:
    path = folder / "manifest.yaml"
    path.write_text(yaml.safe_dump(service), encoding="utf-8")
    flags = ["--state-dir", str(folder / state), "--models-root", str(folder / "models")]
    flags += ["--nodes", str(MOST_REPLICAS), "--gpus", "1", "--gpu-product", GPU, "--cpu", "64", "--memory", "64Gi"]
    async with UpProcess(folder / "up.log", tuple(flags)) as cluster, open_session(timeout_s=600) as session:
        configuration = kubernetes_client.Configuration()
        await kubernetes_config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=cluster.kubeconfig, client_configuration=configuration
        )
        async with kubernetes_client.ApiClient(configuration) as api:
            kube = KubeClient(api)
            await apply(path, service, cluster.kubeconfig, kube, print)
            await wait_ready(kube, NAMESPACE, NAME, 120, print)
            ready_s = time.monotonic()
            target = Target(cluster.gateway_url, NAME, ignore_eos=True)
            await asyncio.sleep(IDLE_S)
            watched = Watched()
            begins_s = time.monotonic() - ready_s
            async with asyncio.TaskGroup() as group:  # which fails where what is watched is not there
                watching = group.create_task(_watch(kube, watched))
                records = await drive(session, target, load, word_rate)
                watching.cancel()
        return ClusterRun(
            outcome=outcome_of(records, watched.replicas, watched.changes),
            startups_s=tuple(took_s for _, took_s in sorted(watched.startups_s.values())),
            begins_s=begins_s,
        )


async def _watch(kube: KubeClient, watched: Watched) -> None:
    """Note what changes, every second."""
    deployment = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{NAME}"
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    began_s, epoch_s = time.monotonic(), time.time()
    while True:
        with suppress(KubeError):
            number = (await kube.request("GET", deployment))["spec"]["replicas"]
            if not watched.replicas or watched.replicas[-1][1] != number:
                watched.replicas.append((time.monotonic() - began_s, number))
            for pod in pods_of((await kube.request("GET", pods))["items"]):
                if pod.ready and pod.ready_since_s is not None:
                    watched.startups_s.setdefault(pod.uid, (pod.created_s, pod.ready_since_s - pod.created_s))
            service = await kube.get_service(NAMESPACE, NAME) or {}
            for each in reversed(service["status"]["autoscaling"]["decisions"]):
                decided = Decided(epoch(each["time"]) - epoch_s, each["replicas"], each["reasons"])
                if decided.time_s >= 0:
                    watched.decisions.setdefault(each["time"], decided)
        await asyncio.sleep(1.0)


def outcome_of(
    records: Sequence[RequestRecord], replicas: list[tuple[float, int]], decisions: Sequence[Decided] = ()
) -> Outcome:
    answered = [record for record in records if record.error is None]
    took_s = max(record.ended_s for record in records)
    return Outcome(
        ttft_s=[record.ttft_s for record in answered],
        output_tokens_per_s=sum(record.output_tokens for record in answered) / took_s,
        failed=len(records) - len(answered),
        replicas=replicas,
        decisions=decisions,
    )


def install_command(folder: Path, settings: dict[str, Any]) -> None:
    """An executable `llmservice` in `folder` that starts timed_server.py with these settings."""
    file = folder / "settings.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    command = folder / "llmservice"
    script = f'#!/bin/sh\nexec "{sys.executable}" "{SERVER}" "{file}" "$(command -p date +%s.%N)" "$@"\n'
    command.write_text(script, encoding="utf-8")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)


def word_rate_of(tokenizer: Tokenizer) -> WordRate:
    """Without requests to the service, which would be part of what the autoscaler knows."""
    rng = np.random.default_rng(0)
    few, many = (len(tokenizer.encode(make_prompt(words, rng)).ids) for words in PROBE_WORDS)
    return WordRate.fitted(few, many)


def trace_of(load: Load, word_rate: WordRate, tokenizer: Tokenizer) -> list[TraceRequest]:
    """With the prompts' own numbers of tokens, of which the planned ones are an estimate.

    An answer ends at the client's limit, which the scheduler and the predictions of lengths know.
    """
    sent = list(load.plan(word_rate))
    tokens = [len(each.ids) for each in tokenizer.encode_batch([request.prompt for request in sent])]
    return [
        TraceRequest(request.at_s, count, request.lengths.output_tokens, max_tokens=request.lengths.output_tokens)
        for request, count in zip(sent, tokens, strict=True)
    ]


def simulate(
    config: FleetConfig, trace: list[TraceRequest], policy: Policy, begins_s: float = 0.0
) -> tuple[Outcome, float]:
    """The outcome of a simulation whose load begins at `begins_s`, and its median time between two tokens."""
    found = Fleet(config, trace, policy, trace[-1].arrival_s).run()
    answered = [request for request in found.requests if request.outcome == "finished"]
    took_s = max(request.ended_s for request in found.requests) - begins_s
    sizes = [(max(0.0, size.time_s - begins_s), size.replicas) for size in found.sizes]
    outcome = Outcome(
        ttft_s=[request.ttft_s for request in answered if request.ttft_s is not None],
        output_tokens_per_s=found.output_tokens / took_s,
        failed=len(found.requests) - len(answered),
        replicas=[size for size, before in zip(sizes, [(0.0, 0), *sizes], strict=False) if size[1] != before[1]],
        decisions=[
            Decided(each.time_s - begins_s, each.decision.replicas, each.decision.reasons) for each in found.changes
        ],
    )
    return outcome, found.gaps.percentile(0.5) or 0.0


def median_of(outcomes: Sequence[Outcome], until_s: float) -> Outcome:
    """Of runs that differ in the times of the ticks: the median of replicas by the second, TTFT of all requests."""
    by_second = [
        (float(second), median_low([each.replicas_at(second) for each in outcomes])) for second in range(round(until_s))
    ]
    return Outcome(
        ttft_s=[time_s for each in outcomes for time_s in each.ttft_s],
        output_tokens_per_s=median([each.output_tokens_per_s for each in outcomes]),
        failed=max(each.failed for each in outcomes),
        replicas=[now for now, before in zip(by_second, [(0.0, 0), *by_second], strict=False) if now[1] != before[1]],
    )


def apart_at(real: Outcome, simulated: Outcome, second: int) -> int:
    """Replicas by which both differ; ticks are not at the same times, so either may be TICK_S late."""
    near = [simulated.replicas_at(time_s) for time_s in range(second - TICK_S, second + TICK_S + 1)]
    return min(abs(real.replicas_at(second) - number) for number in near)


def apart(real: Outcome, simulated: Outcome, until_s: float) -> int:
    """The most replicas by which both differ."""
    return max(apart_at(real, simulated, second) for second in range(round(until_s)))


def where_they_part(real: Outcome, simulated: Outcome, forecast: Outcome, until_s: float) -> list[str]:
    """The first moment at which cluster and forecast are furthest apart, with the decisions that had led there."""
    worst = apart(real, forecast, until_s)
    if not worst:
        return []
    second = next(second for second in range(round(until_s)) if apart_at(real, forecast, second) == worst)
    counts = f"{real.replicas_at(second)} replicas, the forecast {forecast.replicas_at(second)}"
    sentences = [f"At {second} s the cluster had {counts}, one of its simulations {simulated.replicas_at(second)}."]
    for name, outcome in (("the cluster", real), ("that simulation", simulated)):
        before = [each for each in outcome.decisions if each.time_s <= second + TICK_S]
        sentences += [
            f"{each.time_s:.0f} s, {name} -> {each.replicas}: {'; '.join(each.reasons)}." for each in before[-2:]
        ]
    return sentences


Measured = tuple[list[dict[str, Any]], list[Check], list[str]]
"""Rows, checks and notes."""


async def measure_cluster(folder: Path, *, quick: bool) -> Measured:
    profile = QUICK if quick else PROFILE
    command, models = folder / "bin", folder / "models"
    command.mkdir()
    await run_command("make-tiny-model", str(models / "timed"))
    write_model(models / "timed")
    service = manifest(command)
    planned = sized_service(service, read_model(str(models / "timed")))
    latency = latency_of(planned)
    install_command(command, {"latency": latency.to_dict(), "num_blocks": planned.plan.num_blocks, "load_s": LOAD_S})
    arrivals, lengths = requests(profile)
    load = Load(lengths, arrivals=arrivals)
    tokenizer = Tokenizer.from_file(str(models / "timed" / "tokenizer.json"))
    word_rate = word_rate_of(tokenizer)
    sent = trace_of(load, word_rate, tokenizer)
    until_s = sum(duration_s for duration_s, _ in profile)
    outcomes: list[Outcome] = []
    simulations: list[Outcome] = []
    followers: list[Outcome] = []
    for number in range(1 if quick else RUNS):
        run = await run_cluster(folder, f"state-{number}", service, load, word_rate)
        outcomes.append(run.outcome)
        print(f"replicas took {', '.join(f'{each:g}' for each in run.startups_s)} s to start")
        trace = [replace(each, arrival_s=each.arrival_s + run.begins_s) for each in sent]
        config = fleet_config(planned, latency, trace, startup_s=run.startups_s, startups_in_order=True)
        for seed in range(SIMULATIONS):
            policy = make_policy("builtin", Service(planned, latency))
            simulations.append(simulate(replace(config, seed=seed), trace, policy, run.begins_s)[0])
        slots = range(round((until_s + run.begins_s) / SLOT_S))
        replicas = [run.outcome.replicas_at((slot + 0.5) * SLOT_S - run.begins_s) for slot in slots]
        followers.append(simulate(config, trace, Scheduled("cluster", replicas), run.begins_s)[0])
    real, simulated, same_replicas = (median_of(each, until_s) for each in (outcomes, simulations, followers))
    spread = max(
        apart(each, median_of([other for other in simulations if other is not each], until_s), until_s)
        for each in simulations
    )
    for name, outcome in (("cluster", outcomes[0]), ("simulation", simulations[0])):
        for each in outcome.decisions:
            print(f"{name}: {each.time_s:.0f} s -> {each.replicas}: {'; '.join(each.reasons)}")
    rows = [
        *(row_of(f"cluster, run {number}", outcome) for number, outcome in enumerate(outcomes, start=1)),
        row_of("cluster, all runs", real),
        row_of(f"{len(simulations)} simulations", simulated),
        row_of("simulations with the cluster's replicas", same_replicas),
    ]
    slowest = sorted(each.ttft(99) for each in simulations)
    chance = f"Each simulation was within {spread} replicas of the median of the others; TTFT p99 was"
    furthest = max(apart(each, simulated, until_s) for each in outcomes)
    chance += f" {slowest[0]:.1f} to {slowest[-1]:.1f} s in them. Each run was within {furthest} of the forecast."
    notes = [chance, *where_they_part(outcomes[0], simulations[0], simulated, until_s)]
    checks = [
        Check("cluster: error of throughput", "<= 0.1", error(simulated.output_tokens_per_s, real.output_tokens_per_s)),
        Check("cluster: error of TTFT p50", "<= 0.15", error(simulated.ttft(50), real.ttft(50))),
        Check("cluster: error of TTFT p99", "<= 0.3", error(simulated.ttft(99), real.ttft(99))),
        Check("cluster: replicas, most apart", "<= 1", apart(real, simulated, until_s)),
    ]
    return rows, checks, notes


def row_of(name: str, found: Outcome) -> dict[str, Any]:
    return {
        "run": name,
        "failed": found.failed,
        "output_tokens_per_s": found.output_tokens_per_s,
        **{f"ttft_p{percent}_ms": found.ttft(percent) * 1000 for percent in (50, 90, 99)},
        "replicas": ", ".join(f"{number} at {when:.0f} s" for when, number in found.replicas),
    }


def error(simulated: float, real: float) -> float:
    return abs(simulated / real - 1)


@dataclass(frozen=True, slots=True)
class ServerRun:
    """One run of the load on the server, and the simulation with the latency model fitted just before it."""

    real: Outcome
    real_itl_s: float
    simulated: Outcome
    simulated_itl_s: float
    """Medians of the time between two tokens."""


async def calibrate(url: str, file: Path) -> int:
    """Fits the server's latency model; as it advises, again where its error is too high. Returns how often again."""
    for repeated in range(SERVER_CALIBRATIONS):
        with suppress(CommandError):
            await run_command("calibrate", "--url", url, "--model", NAME, "-o", str(file))
            return repeated
    raise CommandError(f"none of {SERVER_CALIBRATIONS} calibrations succeeded: what they printed says why", status=1)


async def measure_server(folder: Path, *, quick: bool) -> Measured:
    model, file = checkpoint("small", "bfloat16"), folder / "latency.json"
    flags = ("--kv-cache-memory", "1GiB", "--max-num-seqs", str(SERVER_SEQS), "--no-prefix-caching")
    command = (LLMSERVICE, "serve", "--model", str(model), "--served-model-name", NAME, "--host", "127.0.0.1")
    arrivals, lengths = requests(((20.0 if quick else SERVER_S, SERVER_RATE),))
    load = Load([each.scaled(SERVER_SCALE) for each in lengths], arrivals=arrivals)
    engine = EngineConfig(model=model, max_num_seqs=SERVER_SEQS, prefix_caching=False)
    runs: list[ServerRun] = []
    repeated = 0
    async with started(*command, "--port", "0", "--metrics-port", "0", *flags) as server, open_session(600) as session:
        target = Target(server.url, NAME, ignore_eos=True)
        word_rate = await measure_word_rate(session, target, np.random.default_rng(0))
        trace = trace_of(load, word_rate, Tokenizer.from_file(str(model / "tokenizer.json")))
        async with session.get(f"{server.url}/sizing") as response:
            report = await response.json()
        for _ in range(1 if quick else SERVER_RUNS):
            repeated += await calibrate(server.url, file)
            records = await drive(session, target, load, word_rate)
            replica = ReplicaConfig(
                latency=LatencyModel.read(file),
                scheduler=continuous_config(engine, SERVER_SEQS, CPU_PREFILL_TOKENS),
                groups=BlockGroups(engine.block_size, SHAPES["small"].layers),
                num_blocks=report["num_blocks"] + 1,
                max_model_len=report["max_model_len"],
            )
            itl_s = float(np.median(np.concatenate([record.itl_s for record in records])))
            simulation = simulate(FleetConfig(replica=replica, initial=1), trace, Static(1))
            runs.append(ServerRun(outcome_of(records, [(0.0, 1)]), itl_s, *simulation))
    rows = [
        {**row_of(f"{name}, run {number}", found), "itl_p50_ms": itl_s * 1000}
        for number, run in enumerate(runs, start=1)
        for name, found, itl_s in (
            ("server", run.real, run.real_itl_s),
            ("simulation", run.simulated, run.simulated_itl_s),
        )
    ]
    errors = sorted(run.simulated_itl_s / run.real_itl_s - 1 for run in runs)
    slowest, fastest = (choose(run.real_itl_s for run in runs) * 1000 for choose in (max, min))
    spread = f"ITL p50 of the server was {fastest:.1f} to {slowest:.1f} ms under the same requests; that of the"
    spread += f" simulations was off by {', '.join(f'{each:+.1%}' for each in errors)}. {repeated} calibrations"
    spread += " ended with the advice to measure the server while it is idle, and were repeated."
    tokens_per_s, itl_s = (
        error(median(simulated), median(real))
        for simulated, real in (
            ([run.simulated.output_tokens_per_s for run in runs], [run.real.output_tokens_per_s for run in runs]),
            ([run.simulated_itl_s for run in runs], [run.real_itl_s for run in runs]),
        )
    )
    checks = [
        Check("server: error of throughput", "<= 0.1", tokens_per_s),
        Check("server: error of ITL p50", "<= 0.1", itl_s),
    ]
    return rows, checks, [spread]


PARTS = {"cluster": measure_cluster, "server": measure_server}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    parser.add_argument("--quick", action="store_true", help="80 and 20 seconds of load; the results are not kept")
    args = parser.parse_args()
    for part in args.only:
        with tempfile.TemporaryDirectory(prefix="reality-") as name:
            rows, checks, notes = asyncio.run(PARTS[part](Path(name), quick=args.quick))
        for row in rows:
            print(json.dumps(row))
        print("\n".join([*notes, *(check.line() for check in checks)]))
        if not args.quick:
            Results(f"reality_{part}", rows, checks, notes=notes).write()


if __name__ == "__main__":
    main()
