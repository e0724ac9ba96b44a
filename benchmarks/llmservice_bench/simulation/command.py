"""`llmservice simulate`: what a manifest will do under a trace's traffic, before a GPU is paid for."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmservice_planner.command import Command, CommandError, check_output, count, duration, number, write_output
from llmservice_planner.traffic.traces import FORMATS

if TYPE_CHECKING:
    from llmservice_bench.simulation.fleet import FleetConfig
    from llmservice_bench.simulation.outcome import Outcome, Targets
    from llmservice_bench.simulation.policies import Service
    from llmservice_planner.traffic.traces import TraceRequest

DEFAULT_STARTUP_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags in groups: what is simulated, what happens, what is shown."""
    parser.add_argument("-f", "--file", type=Path, required=True, metavar="FILE", help="manifest of one LLMService")
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        nargs="+",
        metavar="FILE",
        help="recorded traffic, see `llmservice traffic`",
    )
    parser.add_argument("--format", choices=FORMATS, help="of the trace (default: detected)")
    policies = parser.add_argument_group("policy", "builtin, hpa, keda, kpa, llmd, static:N or clairvoyant")
    policies.add_argument(
        "--policy", default="builtin", metavar="NAME", help="and its options: hpa:target=12:metric=waiting"
    )
    policies.add_argument("--compare", metavar="A,B,…", help="several policies in place of --policy")
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--model",
        metavar="MODEL",
        help="a folder, org/name or URI to read the model's figures from, as of `llmservice plan` (default:"
        " spec.model.shape)",
    )
    engine.add_argument(
        "--latency", type=Path, metavar="FILE", help="of `llmservice calibrate -o` (default: by the GPU's data sheet)"
    )
    _add_events(parser.add_argument_group("what happens"))
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", choices=("text", "json"), default="text", help="for people or for machines")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots and all decisions")
    output.add_argument("--plot", type=Path, metavar="FILE", help="write the plots to a .svg or .png file")


def _add_events(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--startup",
        type=_durations,
        metavar="TIME[,TIME…]",
        help="of a replica until it is ready; of several, each has one at random (default: 60s)",
    )
    group.add_argument(
        "--initial", type=count, metavar="N", help="replicas that are ready at the start (default: minReplicas)"
    )
    group.add_argument("--time-scale", type=number, default=1.0, metavar="X", help="multiply the trace's times")
    group.add_argument(
        "--rate-scale", type=number, default=1.0, metavar="X", help="requests per second, with the same times of day"
    )
    group.add_argument("--duration", type=duration, metavar="TIME", help="end the traffic after this time")
    group.add_argument(
        "--warmup", type=duration, default=0.0, metavar="TIME", help="of the traffic at first, which is not measured"
    )
    group.add_argument("--mtbf", type=duration, metavar="TIME", help="mean time between failures of one replica")
    group.add_argument(
        "--fail-at", type=_durations, metavar="TIME[,TIME…]", help="a ready replica fails at these times"
    )
    group.add_argument(
        "--client-retries", type=count, default=0, metavar="N", help="of a refused request, after its Retry-After"
    )
    group.add_argument("--seed", type=count, default=0, help="same seed, same result")


def _durations(text: str) -> tuple[float, ...]:
    return tuple(duration(one.strip()) for one in text.split(","))


def run(args: argparse.Namespace) -> int:
    """Raises CommandError for what the user can correct."""
    from llmservice_bench.simulation.policies import PolicyError
    from llmservice_bench.simulation.service import SimulationError
    from llmservice_operator.scaling.from_manifest import ManifestError
    from llmservice_planner.charts import ChartError
    from llmservice_planner.model.shape import ShapeError
    from llmservice_planner.sizing.latency import LatencyError
    from llmservice_planner.traffic.traces import TraceError

    try:
        return _run(args)
    except ManifestError as error:
        raise CommandError(f"{args.file}: {error}") from error
    except (PolicyError, SimulationError, ChartError, LatencyError, ShapeError, TraceError) as error:
        raise CommandError(str(error)) from error


def _run(args: argparse.Namespace) -> int:
    from llmservice_bench.simulation.outcome import Targets
    from llmservice_bench.simulation.report import Study, draw, html, text
    from llmservice_planner.charts import check_path, write

    if args.plot is not None:
        check_path(args.plot)
    check_output(args.html)
    service = _service(args)
    trace, duration_s = _trace(args, service)
    slo = service.sized.slo
    targets = Targets(
        math.inf if slo.ttft_p99_s is None else slo.ttft_p99_s, math.inf if slo.itl_p99_s is None else slo.itl_p99_s
    )
    config = _fleet(args, service, trace)
    names = args.compare.split(",") if args.compare else [args.policy]
    began_s = time.perf_counter()
    outcomes = simulate(
        service, config, trace, duration_s, targets, [name.strip() for name in names], warmup_s=args.warmup
    )
    study = Study(_title(service, trace, duration_s), _assumptions(args, service, config), targets, outcomes)
    if args.plot is not None:
        write(draw(study), args.plot)
    if args.html is not None:
        write_output(args.html, html(study))
    if args.output == "json":
        print(json.dumps(_document(study.title, study.assumptions, targets, outcomes), indent=2))
    else:
        print(text(study))
        steps = sum(outcome.num_steps for outcome in outcomes)
        print(f"\nSimulated in {time.perf_counter() - began_s:.1f} s: {steps:,} steps of the engine in what is shown.")
    return 0


def simulate(
    service: Service,
    config: FleetConfig,
    trace: list[TraceRequest],
    duration_s: float,
    targets: Targets,
    names: list[str],
    *,
    warmup_s: float = 0.0,
) -> list[Outcome]:
    """One run for each policy; those of one policy with different options are named with these.

    Raises PolicyError, before anything is computed.
    """
    from llmservice_bench.simulation.clairvoyant import clairvoyant
    from llmservice_bench.simulation.fleet import Fleet
    from llmservice_bench.simulation.policies import CLAIRVOYANT, make_policy

    policies = [None if name == CLAIRVOYANT else make_policy(name, service) for name in names]
    outcomes = []
    for policy in policies:
        if policy is None:
            found = clairvoyant(config, trace, service.bounds, targets, duration_s, warmup_s=warmup_s)
            outcomes.append(found.outcome)
        else:
            outcomes.append(Fleet(config, trace, policy, duration_s, warmup_s=warmup_s).run())
    times = Counter(outcome.policy for outcome in outcomes)
    return [
        outcome if times[outcome.policy] == 1 else replace(outcome, policy=name)
        for name, outcome in zip(names, outcomes, strict=True)
    ]


def _service(args: argparse.Namespace) -> Service:
    import yaml

    from llmservice_bench.simulation.policies import Service
    from llmservice_bench.simulation.service import latency_of
    from llmservice_operator.scaling.from_manifest import sized_service
    from llmservice_planner.model.source import read_model
    from llmservice_planner.sizing.latency import LatencyModel

    try:
        documents = [one for one in yaml.safe_load_all(args.file.read_text(encoding="utf-8")) if one]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise CommandError(f"{args.file} cannot be read as the YAML of a manifest: {why}") from error
    services = [one for one in documents if isinstance(one, dict) and one.get("kind") == "LLMService"]
    if len(services) != 1:
        raise CommandError(f"{args.file} has {len(services)} LLMServices, expected one: give a file with one manifest")
    figures = None if args.model is None else read_model(args.model, _overrides(services[0]))
    measured = None if args.latency is None else LatencyModel.read(args.latency)
    sized = sized_service(services[0], figures)
    return Service(sized, latency_of(sized, measured))


def _overrides(manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Those of a manifest that need not be valid."""
    found: Any = manifest
    for key in ("spec", "model", "configOverrides"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _trace(args: argparse.Namespace, service: Service) -> tuple[list[TraceRequest], float]:
    """The requests, and how long the traffic lasts: until the last of them, or as given."""
    from llmservice_bench.simulation.traffic import scaled
    from llmservice_planner.traffic.traces import TraceError, read_requests

    trace = scaled(read_requests(args.trace, args.format), args.time_scale, args.rate_scale, args.seed)
    if service.sized.service.spec.default_lane == "batch":  # the highest that a client may choose
        trace = [replace(each, lane="batch") for each in trace]
    duration_s = args.duration
    if duration_s is not None:
        trace = [each for each in trace if each.arrival_s < duration_s]
    if not trace:
        raise TraceError("the trace has no request within --duration and --rate-scale: raise them")
    lasts_s = duration_s or trace[-1].arrival_s
    if not lasts_s:
        raise CommandError("all requests of the trace come at the same time: say how long to simulate with --duration")
    if args.warmup >= lasts_s or args.warmup > trace[-1].arrival_s:
        raise CommandError(f"--warmup {args.warmup:g} s leaves no request to measure: shorten it")
    return trace, lasts_s


def _fleet(args: argparse.Namespace, service: Service, trace: list[TraceRequest]) -> FleetConfig:
    from llmservice_bench.simulation.service import fleet_config

    return fleet_config(
        service.sized,
        service.latency,
        trace,
        initial=args.initial,
        startup_s=args.startup or (DEFAULT_STARTUP_S,),
        mtbf_s=math.inf if args.mtbf is None else args.mtbf,
        failures_s=args.fail_at or (),
        client_retries=args.client_retries,
        seed=args.seed,
    )


def _title(service: Service, trace: list[TraceRequest], duration_s: float) -> str:
    from llmservice_bench.simulation.report import duration

    request = service.sized.request
    rate = len(trace) / max(duration_s, 1e-9)
    requests = f"{len(trace):,} requests in {duration(duration_s)} ({rate:.2f}/s)"
    return f"{service.sized.name} on {request.device.name}: {requests}"


def _assumptions(args: argparse.Namespace, service: Service, config: FleetConfig) -> list[str]:
    """What the result depends on."""
    plan, slo = service.sized.plan, service.sized.slo
    source = f"measured, from {args.latency}" if args.latency else "by the GPU's data sheet (measure it: calibrate)"
    starts = ", ".join(f"{each:g} s" for each in config.startup_s)
    bounds = service.bounds
    promises = [
        *([f"99 % of first tokens within {slo.ttft_p99}"] if slo.ttft_p99 else []),
        *([f"99 % of the times between a request's tokens within {slo.itl_p99}"] if slo.itl_p99 else []),
    ]
    kv_tokens = (plan.num_blocks - 1) * plan.block_size
    limits = f"{plan.max_num_seqs} sequences, {kv_tokens:,} KV tokens, {plan.max_num_batched_tokens} tokens a step"
    sentences = [
        f"Promised: {'; '.join(promises) or 'nothing (spec.slo is empty)'}.",
        f"Replica: {limits}; step times {source}.",
        f"Replicas: {bounds.min_replicas} to {bounds.max_replicas}, {config.initial} at first; a start takes {starts}.",
    ]
    if args.initial is None:
        sentences.append("If the trace begins in the midst of traffic: --initial N replicas at first, and --warmup 2m.")
    if args.warmup:
        sentences.append(f"Warm-up: the first {args.warmup:g} s of the traffic are simulated and not measured.")
    if service.sized.service.spec.engine.swap_space_gib:
        sentences.append("swapSpaceGiB is not simulated: preempted requests are computed again.")
    return sentences


def _document(title: str, assumptions: Any, targets: Targets, outcomes: list[Outcome]) -> dict[str, Any]:
    bounds = {
        name: None if value == math.inf else value
        for name, value in (("ttft_p99_seconds", targets.ttft_s), ("itl_p99_seconds", targets.itl_s))
    }
    return {
        "title": title,
        "assumptions": list(assumptions),
        "targets": bounds,
        "policies": [outcome.to_dict(targets) for outcome in outcomes],
    }


COMMAND = Command(
    help="simulate a service under recorded traffic: promises kept, GPU-hours, and every decision of the autoscaler",
    add_arguments=add_arguments,
    run=run,
    extra="bench",
    requires=("msgspec", "numpy", "pydantic"),
)
