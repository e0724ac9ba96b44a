"""Promises kept against GPU-hours for every autoscaling policy, in simulated time.

Each policy scales an 8B model on L4s, of which one is a replica, under the same requests: six shapes of synthetic
traffic (Poisson arrivals, lengths of the Azure conversation trace), and the second half of recorded traces. The
scheduler, the admission queue and the operator's decisions are the real code; steps take the time of the latency model.
A request keeps the promise if its first token comes within 2 s of its arrival; one that is refused or fails does not.

The traffic lasts ten minutes, or twice the start-up time where that is longer: no decision shows before a replica has
started. Two minutes at its first rate (of a recorded trace, the two minutes before) come first and are not measured;
every run begins with the most replicas that the clairvoyant schedule has in these. GPU-hours are those of the time that
is measured, from a replica's creation to its end. The load is the rate at the peak, in replicas that would serve it at
80 % utilisation.

The policies: `builtin` is the operator's; `hpa` and `keda` scale on requests in flight, `kpa` is Knative's, `llmd` is
llm-d's queueing model. The targets of the first three are the best of some shares of a replica's sequences on the first
half of the Azure trace. `clairvoyant` knows all arrivals and answers, and starts replicas ahead: GPU-hours are compared
with its. The goal of the built-in policy: at least 99 % within the target at 1.3 times these GPU-hours or less, and no
other policy better in one of the two and no worse in the other.

In the table, `kept` is the per cent of requests within the target, `gpu` the multiple of the clairvoyant schedule's
GPU-hours, and `turns` the most changes of direction within the stabilisation window (120 to 300 s), of which the shapes
are to have one at most. Of several seeds it has the means, and the most changes.

`--mispredicted` has daily cycles of half an hour in which steps take 0.6 to 1.7 times what the latency model says, as
on a GPU that is slower or faster than its data sheet, with answers of the trace, and of 2,500 tokens where a server
first expects some two hundred. The load is in replicas of the true speed, which the clairvoyant schedule knows.

    python benchmarks/autoscaling.py --azure azure_llm_conv_2023.csv

After a change of the built-in policy alone, `--again` runs it against the recorded results of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from llmservice_bench.models import LLAMA_3_8B
from llmservice_bench.results import FOLDER, Check, Results
from llmservice_bench.simulation.clairvoyant import PROMISED, SLOT_S, clairvoyant
from llmservice_bench.simulation.fleet import Fleet, FleetConfig
from llmservice_bench.simulation.outcome import Outcome, Targets
from llmservice_bench.simulation.policies import Service, make_policy
from llmservice_bench.simulation.service import fleet_config, latency_of
from llmservice_bench.simulation.traffic import SHAPES, Shape, synthetic
from llmservice_bench.trace import SAMPLE
from llmservice_operator.api.autoscaling_spec import ScaleDown
from llmservice_operator.scaling.from_manifest import sized_service
from llmservice_operator.scaling.policy import ScalingRules
from llmservice_planner.capacity.replica import UTILISATION, ReplicaLimits, Work, replica_capacity
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_planner.traffic.traces import TraceRequest, read_requests

MANIFEST: dict[str, Any] = {
    "apiVersion": "serving.llmservice.io/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "llama3-8b"},
    "spec": {
        "model": {
            "uri": "hf://meta-llama/Meta-Llama-3-8B-Instruct",
            "shape": LLAMA_3_8B,
        },
        "resources": {"gpu": {"product": "l4", "count": 1}, "requests": {"cpu": "4", "memory": "32Gi"}},
        "engine": {"maxModelLen": 8192},
        "slo": {"ttftP99": "2s"},
        "autoscaling": {"minReplicas": 1, "maxReplicas": 24},
    },
}
TARGETS = Targets(ttft_s=2.0)
LOADS, FULL_LOADS = (2.0, 6.0), (2.0, 6.0, 12.0)
STARTUPS_S, FULL_STARTUPS_S = (30.0, 600.0), (30.0, 130.0, 600.0)
SEEDS, FULL_SEEDS = (0,), (0, 1, 2)
LEAST_DURATION_S, WARMUP_S = 600.0, 120.0
MOST_RATIO = 1.3
"""GPU-hours of the built-in policy, of those of the clairvoyant one."""
OWN = "builtin"
STEPS = (0.6, 1.0, 1.7)
"""What they take of what the latency model says, with `--mispredicted`."""
LONG_TOKENS, CYCLE_S, CYCLE_LOAD, CYCLE_STARTUP_S = 2500, 1800.0, 12.0, 130.0
TUNED = {"hpa": (0.4, 0.6, 0.8), "keda": (0.4, 0.6, 0.8), "kpa": (0.4, 0.55, 0.7)}
"""Targets to choose from, as shares of the sequences that a replica runs at once; the last is the published default."""


@dataclass(frozen=True, slots=True)
class Case:
    """One traffic and start-up time, for all policies."""

    name: str
    load: float | None
    """None: as recorded."""
    startup_s: float
    seed: int
    trace: Sequence[TraceRequest]
    """The warm-up included."""
    duration_s: float
    policies: Sequence[str]
    recorded: Mapping[str, Any] | None = None
    """The row of an earlier run, with figures of the policies that are not run again."""
    steps: float = 1.0
    """What they take of what the latency model says."""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.load, self.startup_s, self.seed


def service() -> Service:
    sized = sized_service(MANIFEST)
    return Service(sized, latency_of(sized))


def peak_rate(of: Service, lengths: Sequence[TraceRequest]) -> float:
    """Requests per second that one replica serves at 80 % utilisation."""
    plan = of.sized.plan
    kv_tokens = (plan.num_blocks - 1) * plan.block_size
    limits = ReplicaLimits(plan.max_num_seqs, kv_tokens, plan.max_num_batched_tokens, plan.prefill_chunk_tokens)
    work = Work.of([(each.prompt_tokens, each.output_tokens) for each in lengths])
    return UTILISATION * replica_capacity(of.latency, limits, work, TARGETS.ttft_s).requests_per_s


def short_enough(of: Service, trace: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Without the requests that the model's context refuses whatever the policy."""
    longest = of.sized.plan.max_model_len
    return [each for each in trace if each.prompt_tokens + each.output_tokens <= longest]


def synthetic_cases(of: Service, args: argparse.Namespace, policies: Sequence[str]) -> list[Case]:
    lengths = short_enough(of, read_requests([SAMPLE]))
    rate = peak_rate(of, lengths)
    cases = []
    for startup_s in FULL_STARTUPS_S if args.full else STARTUPS_S:
        duration_s = max(LEAST_DURATION_S, 2 * startup_s)
        for name in args.shapes:
            for load in FULL_LOADS if args.full else LOADS:
                for seed in FULL_SEEDS if args.full else SEEDS:
                    shape, whole_s = SHAPES[name], WARMUP_S + duration_s
                    requests = synthetic(after_warmup(shape, whole_s), load * rate, whole_s, lengths, seed)
                    cases.append(Case(name, load, startup_s, seed, requests, whole_s, policies))
    return cases


def after_warmup(shape: Shape, whole_s: float) -> Shape:
    """The shape's first rate during the warm-up, then the shape."""
    begins = WARMUP_S / whole_s
    return lambda at: shape(max(0.0, at - begins) / (1 - begins))


def recorded_cases(of: Service, args: argparse.Namespace, policies: Sequence[str]) -> list[Case]:
    """The second half of each trace."""
    cases = []
    for path in [*([args.azure] if args.azure else []), *args.trace]:
        _, second, duration_s = halves(short_enough(of, read_requests([path])))
        startups = FULL_STARTUPS_S if args.full else STARTUPS_S
        cases += [Case(path.stem, None, startup_s, 0, second, duration_s, policies) for startup_s in startups]
    return cases


def mispredicted_cases(of: Service, policies: Sequence[str]) -> list[Case]:
    """Daily cycles in which the latency model is wrong, with answers of the trace and with long ones."""
    drawn = short_enough(of, read_requests([SAMPLE]))
    long = short_enough(of, (replace(each, output_tokens=LONG_TOKENS) for each in drawn))
    whole_s, cases = WARMUP_S + CYCLE_S, []
    for name, lengths in (("answers of the trace", drawn), ("long answers", long)):
        for steps in STEPS:
            peak_per_s = CYCLE_LOAD * peak_rate(replace(of, latency=slowed(of.latency, steps)), lengths)
            requests = synthetic(after_warmup(SHAPES["daily cycle"], whole_s), peak_per_s, whole_s, lengths, seed=0)
            named = f"{name} x{steps:g}"
            cases.append(Case(named, CYCLE_LOAD, CYCLE_STARTUP_S, 0, requests, whole_s, policies, steps=steps))
    return cases


def slowed(latency: LatencyModel, by: float) -> LatencyModel:
    """All its times are multiplied."""
    times = (each.name for each in fields(latency) if each.name.endswith("_s"))
    return replace(latency, **{name: by * getattr(latency, name) for name in times})


def halves(trace: Sequence[TraceRequest]) -> tuple[list[TraceRequest], list[TraceRequest], float]:
    """By time; the second one with a warm-up before it, which is of the first. Both begin at 0, and last so long."""
    middle_s, end_s = trace[-1].arrival_s / 2, trace[-1].arrival_s
    first = [each for each in trace if each.arrival_s < middle_s]
    from_s = max(0.0, middle_s - WARMUP_S)
    second = [replace(each, arrival_s=each.arrival_s - from_s) for each in trace if each.arrival_s >= from_s]
    return first, second, end_s - from_s


def run_case(case: Case) -> dict[str, Any]:
    """A flat row: of each policy the per cent of requests within the target, and its GPU-hours as a multiple."""
    of = service()
    latency = slowed(of.latency, case.steps)
    config = fleet_config(of.sized, latency, case.trace, startup_s=(case.startup_s,), seed=case.seed)
    row = _with_best(of, config, case) if case.recorded is None else dict(case.recorded)
    config = replace(config, initial=row["initial_replicas"])
    for text in case.policies:
        outcome = run(of, config, case, text)
        name = text.partition(":")[0]
        row[f"{name}_kept"] = 100 * outcome.attainment(TARGETS).ttft
        row[f"{name}_gpu"] = outcome.gpu_hours / row["clairvoyant_gpu_hours"]
        if text == OWN:
            row[f"{OWN}_turns"] = outcome.turns_within(stabilization_s(case.startup_s))
    return row


def _with_best(of: Service, config: FleetConfig, case: Case) -> dict[str, Any]:
    """The case, with the figures of the clairvoyant schedule."""
    best = clairvoyant(config, case.trace, of.bounds, TARGETS, case.duration_s, warmup_s=WARMUP_S)
    return {
        "traffic": case.name,
        "load_replicas": case.load,
        "startup_s": case.startup_s,
        "seed": case.seed,
        "requests": len(best.outcome.requests),
        "initial_replicas": max(best.serving[: int(WARMUP_S / SLOT_S)]),
        "clairvoyant_kept": 100 * best.outcome.attainment(TARGETS).ttft,
        "clairvoyant_gpu_hours": best.outcome.gpu_hours,
    }


def stabilization_s(startup_s: float) -> float:
    return ScalingRules.of(ScaleDown()).with_start(startup_s).stabilization_s


def run(of: Service, config: FleetConfig, case: Case, policy: str) -> Outcome:
    return Fleet(config, case.trace, make_policy(policy, of), case.duration_s, warmup_s=WARMUP_S).run()


def tune(of: Service, azure: Path | None, workers: ProcessPoolExecutor) -> tuple[list[str], list[str]]:
    """The policies with the targets that are best on the first half, and what was tried.

    Best is the fewest GPU-hours with the promise kept, or else the most requests within the target.
    """
    if azure is None:
        return [OWN, *TUNED, "llmd"], ["not tuned, as there is no --azure FILE: the published defaults"]
    first, _, _ = halves(short_enough(of, read_requests([azure])))
    duration_s = first[-1].arrival_s
    tried = [
        f"{name}:target={round(max(1.0, share * of.slots), 1)}" for name, shares in TUNED.items() for share in shares
    ]
    cases = [Case("tuning", None, 30.0, 0, first, duration_s, [policy]) for policy in tried]
    found = list(workers.map(_tuned, cases))
    chosen, notes = [], []
    for name in TUNED:
        own = [one for one in found if one[0].startswith(f"{name}:")]
        kept = [one for one in own if one[1] >= PROMISED]
        best = min(kept, key=lambda one: one[2]) if kept else max(own, key=lambda one: one[1])
        chosen.append(best[0])
        shown = ", ".join(
            f"{policy.partition('=')[2]}: {share:.2%} at {hours:.2f} GPU-hours" for policy, share, hours in own
        )
        notes.append(f"{name} is tuned to {best[0].partition('=')[2]} in flight per replica ({shown})")
    return [OWN, *chosen, "llmd"], notes


def _tuned(case: Case) -> tuple[str, float, float]:
    of = service()
    config = fleet_config(of.sized, of.latency, case.trace, startup_s=(case.startup_s,), initial=4)
    outcome = run(of, config, case, case.policies[0])
    return case.policies[0], outcome.attainment(TARGETS).ttft, outcome.gpu_hours


def speed(azure: Path) -> Check:
    """CPU time of the whole trace on ten replicas, as `llmservice simulate --policy static:10` simulates it."""
    of = service()
    trace = short_enough(of, read_requests([azure]))
    began_s = time.process_time()
    config = fleet_config(of.sized, of.latency, trace, initial=10)
    outcome = Fleet(config, trace, make_policy("static:10", of)).run()
    seconds = time.process_time() - began_s
    what = f"an hour of the Azure trace on 10 replicas, {outcome.num_steps:,} steps: CPU time of one core"
    return Check(what, "<= 60", seconds, "s")


def met(row: dict[str, Any]) -> bool:
    return bool(row[f"{OWN}_kept"] >= 100 * PROMISED and row[f"{OWN}_gpu"] <= MOST_RATIO)


def beaten_by(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Other policies that are better in one of requests within the target and GPU-hours, and no worse in the other."""
    kept, gpu = row[f"{OWN}_kept"], row[f"{OWN}_gpu"]
    return [
        name
        for name in names
        if row[f"{name}_kept"] >= kept
        and row[f"{name}_gpu"] <= gpu
        and (row[f"{name}_kept"], row[f"{name}_gpu"]) != (kept, gpu)
    ]


def show(row: dict[str, Any], names: Sequence[str]) -> str:
    """A line of the table on the terminal."""
    load = "" if row["load_replicas"] is None else f"{row['load_replicas']:g}"
    head = f"{row['traffic'][:25]:<25}{load:>5}{row['startup_s']:>6g}s{row['clairvoyant_gpu_hours']:>8.2f}"
    cells = [f"{row[f'{name}_kept']:>8.2f}% x{row[f'{name}_gpu']:<5.2f}" for name in names]
    verdict = "met" if met(row) else "MISSED"
    others = beaten_by(row, names)
    return f"{head}{''.join(cells)}  {verdict}{', beaten by ' + ', '.join(others) if others else ''}"


def header(names: Sequence[str]) -> str:
    return (
        f"{'traffic':<25}{'load':>5}{'start':>7}{'best h':>8}{''.join(f'{name:>16}' for name in names)}  goal of {OWN}"
    )


def checks(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Check]:
    found = []
    for startup_s in sorted({row["startup_s"] for row in rows}):
        own = [row for row in rows if row["startup_s"] == startup_s]
        what = f"start-up {startup_s:g} s, of {len(own)} traffics"
        beaten = sum(bool(beaten_by(row, names)) for row in own)
        found += [
            Check(
                f"{what}: {OWN} keeps >= 99 % at <= {MOST_RATIO} x clairvoyant's GPU-hours",
                f"= {len(own)}",
                sum(map(met, own)),
            ),
            Check(f"{what}: another policy is better in one, and no worse in the other", "= 0", beaten),
        ]
        if turns := [row[f"{OWN}_turns"] for row in own if row["load_replicas"] is not None]:
            within = f"within {stabilization_s(startup_s):g} s"
            what = f"start-up {startup_s:g} s, of the shapes: most changes of direction of {OWN} {within}"
            found.append(Check(what, "<= 1", max(turns)))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--azure", type=Path, metavar="CSV", help="the Azure trace: its first half tunes the others")
    parser.add_argument("--trace", type=Path, nargs="+", default=[], metavar="FILE", help="further traces")
    parser.add_argument("--full", action="store_true", help="three start-up times, three loads, three seeds")
    parser.add_argument("--mispredicted", action="store_true", help="instead: with a latency model that is wrong")
    parser.add_argument("--shapes", nargs="*", choices=sorted(SHAPES), default=list(SHAPES), help="of the traffic")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--again", action="store_true", help="the built-in policy alone, and the others as recorded")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    if args.mispredicted and (args.full or args.trace or args.shapes != list(SHAPES)):
        parser.error("--mispredicted has traffic of its own: leave out --full, --trace and --shapes")
    return args


def read_recorded(path: Path) -> dict[str, Any]:
    """The results of an earlier run of all policies."""
    try:
        recorded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        sys.exit(f"{path} does not exist: run once without --again")
    if any("initial_replicas" not in row for row in recorded["rows"]):
        sys.exit(f"{path} is of an earlier version, without the replicas at the start: run once without --again")
    return recorded


def again(recorded: Mapping[str, Any], cases: Sequence[Case]) -> list[Case]:
    """The cases for the built-in policy alone, each with its recorded row."""
    rows = {(row["traffic"], row["load_replicas"], row["startup_s"], row["seed"]): row for row in recorded["rows"]}
    if missing := [case for case in cases if case.key not in rows]:
        first = missing[0]
        sys.exit(
            f"{recorded['name']}.json has no row for {first.name} at load {first.load}, start-up {first.startup_s:g} s,"
            f" seed {first.seed}: run once without --again"
        )
    return [replace(case, policies=[OWN], recorded=rows[case.key]) for case in cases]


def main() -> int:
    args = parse()
    began_s = time.perf_counter()
    of = service()
    title = "autoscaling_full" if args.full else "autoscaling_mispredicted" if args.mispredicted else "autoscaling"
    recorded = read_recorded(FOLDER / f"{title}.json") if args.again else None
    with ProcessPoolExecutor(args.processes) as workers:
        policies, notes = (
            (recorded["settings"]["policies"], recorded["notes"]) if recorded else tune(of, args.azure, workers)
        )
        names = [policy.partition(":")[0] for policy in policies]
        cases = (
            mispredicted_cases(of, policies)
            if args.mispredicted
            else [*synthetic_cases(of, args, policies), *recorded_cases(of, args, policies)]
        )
        if recorded:
            cases = again(recorded, cases)
        print(header(names), flush=True)
        rows = []
        for row in workers.map(run_case, cases):
            rows.append(row)
            print(show(row, names), flush=True)
        measured = [workers.submit(speed, args.azure).result()] if args.azure and not args.mispredicted else []
    found = [*checks(rows, names), *measured]
    for check in found:
        print(check.line())
    minutes = (time.perf_counter() - began_s) / 60
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_minutes = (used.ru_utime + used.ru_stime) / 60
    print(f"{minutes:.1f} minutes with {args.processes} processes, {cpu_minutes:.1f} of CPU time")
    took = {"processes": args.processes, "minutes": round(minutes, 1), "cpu_minutes": round(cpu_minutes, 1)}
    if recorded:  # the time that all policies took stays
        others = recorded["settings"].get("others_at", recorded["commit"])
        settings = {**recorded["settings"], "others_at": others, "builtin_cpu_minutes": took["cpu_minutes"]}
    else:
        settings = {"policies": policies, **took}
    if not args.no_write:
        Results(title, rows, found, settings, notes).write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
