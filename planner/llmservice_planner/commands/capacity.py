"""`llmservice plan --rate … | --trace …`: replicas of each GPU for the traffic, what limits them, costs, a manifest."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmservice_planner.capacity.manifest import manifest, to_yaml
from llmservice_planner.capacity.plan import Candidate, Targets, Traffic, candidates
from llmservice_planner.capacity.recommendations import quiet_rate, replicas_for
from llmservice_planner.capacity.replica import UTILISATION
from llmservice_planner.command import CommandError, positive
from llmservice_planner.model.quantization import Quantization
from llmservice_planner.model.source import ModelFigures
from llmservice_planner.sizing.gpu import GPU, GPUS, UnknownGPU, find_gpu
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_planner.sizing.request import SizingRequest
from llmservice_planner.sizing.workload import Workload, for_workload
from llmservice_planner.traffic.lengths import Lengths, LengthsError, pairs, percentile
from llmservice_planner.traffic.summary import Statistics, summarise
from llmservice_planner.traffic.traces import TraceError, iter_requests

_FLAGS = ("rate", "trace")
_FEW = 0.01
"""Of the requests: so many at most are longer than the length that is chosen where the model knows it."""


def add_traffic_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate",
        type=_rate,
        metavar="N",
        help="requests per second; with --trace: instead of its busiest window's tokens",
    )
    group.add_argument(
        "--prompt-tokens",
        type=_lengths,
        metavar="LENGTHS",
        help="of prompts: p50=512,p99=4096 (log-normal), or 512 if all are alike",
    )
    group.add_argument("--output-tokens", type=_lengths, metavar="LENGTHS", help="of answers, likewise")
    group.add_argument(
        "--trace",
        type=Path,
        action="append",
        metavar="FILE",
        help="rate and lengths from recorded traffic, of a format that `llmservice traffic` reads",
    )
    group.add_argument(
        "--prefix-hit-rate",
        type=_share,
        metavar="SHARE",
        help="share of prompt tokens in the prefix cache, 0 to 1; default: what the trace recorded, else 0",
    )
    group.add_argument("--price", type=_price, action="append", metavar="GPU=PRICE", help="of a GPU and hour: l40s=1.9")


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the flags ask for a plan of capacity. Raises `CommandError` for flags that only such a plan has."""
    if any(getattr(args, name) is not None for name in _FLAGS):
        return True
    with_curve = args.curve or args.curve_out is not None
    lengths = () if with_curve else ("prompt_tokens", "output_tokens")
    for name in (*lengths, "prefix_hit_rate", "price"):
        if getattr(args, name):
            flag = "--" + name.replace("_", "-")
            raise CommandError(f"{flag} is about traffic: give --rate N or --trace FILE as well")
    for name in ("ttft_p99", "latency"):
        serves = with_curve or (name == "latency" and args.measured is not None)
        if getattr(args, name) is not None and not serves:
            flag = "--" + name.replace("_", "-")
            raise CommandError(f"{flag} is about traffic or the curve: give --rate N, --trace FILE or --curve as well")
    return False


def weights_of(model: ModelFigures, dtype: str, quantization: Quantization) -> int | None:
    """Bytes of the weights where the checkpoint's files tell; None: they are counted from the shape."""
    if model.shape.quantization is not None or model.shape.counts is not None or quantization == "int8":
        return None
    return model.weights_bytes(model.shape.dtype if dtype == "auto" else dtype)


def plan_capacity(args: argparse.Namespace, model: ModelFigures, settings: Mapping[str, Any]) -> int:
    """Prints the plan; the exit status is 1 if no GPU keeps the targets."""
    if args.cpu_memory is not None:
        raise CommandError("--rate plans for GPUs, whose rates are known: leave out --cpu-memory")
    if args.gpu_count != 1:
        raise CommandError("--rate finds the GPUs per replica itself: leave out --gpu-count")
    if args.curve or args.curve_out:
        raise CommandError("--curve shows one replica without its traffic: leave out --rate and --trace")
    if args.latency is not None and len(args.gpu or ()) != 1:
        raise CommandError("--latency is measured on one GPU: name it with --gpu")
    latency = None if args.latency is None else LatencyModel.read(args.latency)
    asked = _asked(args)
    gpus = list(dict.fromkeys(map(find_gpu, args.gpu))) if args.gpu else list(GPUS.values())
    targets, prices = Targets(args.ttft_p99, args.itl_p99), _prices(args.price or ())
    if unused := ", ".join(prices.keys() - {gpu.name for gpu in gpus}):
        raise CommandError(f"--price names {unused}, and --gpu does not: add it, or leave the price out")
    base = _base(model, asked.traffic, settings, gpus[0])
    chosen = for_workload(base, args.workload)  # but for the token budget, which each candidate chooses
    base = replace(chosen, max_num_batched_tokens=base.max_num_batched_tokens)
    if asked.traffic.share_longer_than(base.model_len) == 1:
        raise CommandError(
            f"all requests are longer than max_model_len {base.model_len}, and would be refused: shorten them, or "
            "choose a model that knows more positions"
        )
    found = candidates(base, gpus, asked.traffic, targets, prices, latency)
    document = _manifest(found, model, targets, asked, args.workload)
    print(_render(args.output, found, asked, targets, document, model))
    return 0 if any(each.replicas for each in found) else 1


@dataclass(frozen=True, slots=True)
class _Asked:
    traffic: Traffic
    statistics: Statistics | None
    source: str


def _asked(args: argparse.Namespace) -> _Asked:
    if args.trace is None:
        if args.prompt_tokens is None or args.output_tokens is None:
            raise CommandError("how long are the requests? give --prompt-tokens and --output-tokens, or --trace FILE")
        lengths = pairs(args.prompt_tokens, args.output_tokens)
        return _Asked(Traffic(args.rate, lengths, args.prefix_hit_rate or 0.0), None, "as given, log-normal")
    if args.prompt_tokens is not None or args.output_tokens is not None:
        raise CommandError("the lengths come from --trace: leave out --prompt-tokens and --output-tokens")
    try:
        statistics = summarise(iter_requests(args.trace))
    except TraceError as error:
        raise CommandError(str(error)) from error
    rate, source = args.rate, "the given rate"
    if rate is None:
        rate = max(statistics.loads)
        source = f"of the mean length, as the tokens of the busiest {statistics.windows.window_s:g} s are"
    hit_rate = args.prefix_hit_rate if args.prefix_hit_rate is not None else statistics.cached_share or 0.0
    return _Asked(Traffic(rate, statistics.pairs(), hit_rate), statistics, source)


def _base(model: ModelFigures, traffic: Traffic, settings: Mapping[str, Any], gpu: GPU) -> SizingRequest:
    """The request of every candidate; lengths that the user has not set are the traffic's."""
    given = dict(settings)
    longest = model.shape.max_position_embeddings
    if given["max_model_len"] is None:
        given["max_model_len"] = min(traffic.max_model_len, longest or traffic.max_model_len)
    if given["expected_tokens"] is None:
        given["expected_tokens"] = min(traffic.expected_tokens, given["max_model_len"])
    weights = weights_of(model, given["dtype"], given["quantization"])
    return SizingRequest(shape=model.shape, device=gpu, weights_bytes=weights, **given)


def _manifest(
    found: Sequence[Candidate],
    model: ModelFigures,
    targets: Targets,
    asked: _Asked,
    workload: Workload | None,
) -> dict[str, Any] | None:
    best = next((each for each in found if each.servable), None)
    if best is None or model.uri is None or best.capacity is None:
        return None
    least = best.replicas
    if asked.statistics is not None:
        least = replicas_for(quiet_rate(asked.statistics), best.capacity)
    expected = best.request.typical_tokens
    document = manifest(best, model.uri, targets, expected_tokens=expected, min_replicas=least, workload=workload)
    if model.overrides:
        document["spec"]["model"]["configOverrides"] = dict(model.overrides)
    return document


def _render(
    output: str,
    found: Sequence[Candidate],
    asked: _Asked,
    targets: Targets,
    document: dict[str, Any] | None,
    model: ModelFigures,
) -> str:
    if output == "manifest":
        if document is None:
            raise CommandError(_no_manifest(model))
        return to_yaml(document)
    if output in {"json", "yaml"}:
        answer = {
            "requests_per_s": asked.traffic.requests_per_s,
            "prefix_hit_rate": asked.traffic.prefix_hit_rate,
            "share_longer_than_max_model_len": asked.traffic.share_longer_than(found[0].request.model_len),
            "ttft_p99_s": targets.ttft_p99_s,
            "itl_p99_s": targets.itl_p99_s,
            "planned_utilisation": UTILISATION,
            "candidates": [each.to_dict(asked.traffic) for each in found],
            "manifest": document,
        }
        return json.dumps(answer, indent=2) if output == "json" else to_yaml(answer)
    return "\n".join(_text(found, asked, targets, document, model))


def _no_manifest(model: ModelFigures) -> str:
    if model.uri is None:
        return "no manifest, as --shape names no model to serve: give --model"
    return "no manifest, as no candidate both keeps the targets and is servable: relax them, or add a larger GPU"


def _text(
    found: Sequence[Candidate],
    asked: _Asked,
    targets: Targets,
    document: dict[str, Any] | None,
    model: ModelFigures,
) -> Iterator[str]:
    traffic = asked.traffic
    prompts, outputs = (sorted(values) for values in zip(*traffic.lengths, strict=True))
    yield f"Traffic: {traffic.requests_per_s:.4g} requests/s ({asked.source})"
    for name, values in (("prompts", prompts), ("answers", outputs)):
        p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
        yield f"  {name}: p50 {p50:.0f}, p99 {p99:.0f}, mean {sum(values) / len(values):.0f} tokens"
    length = found[0].request.model_len
    if (longer := traffic.share_longer_than(length)) > _FEW:
        yield f"  {longer:.1%} of the requests are longer than max_model_len {length}, and would be refused"
    if traffic.prefix_hit_rate:
        yield f"  prefix cache: {traffic.prefix_hit_rate:.0%} of the prompt tokens"
    promise = [
        f"{name} p99 {value * 1e3:.4g} ms"
        for name, value in (("TTFT", targets.ttft_p99_s), ("ITL", targets.itl_p99_s))
        if value is not None
    ]
    yield f"Promise: {', '.join(promise) or 'none'}, at {UTILISATION:.0%} of what a replica sustains"
    yield ""
    yield from _table([each for each in found if each.replicas], traffic)
    missed = [each for each in found if not each.replicas]
    if missed:
        yield ""
        yield from (f"{each.gpu.name}: {each.problem}" for each in missed)
    yield ""
    if document is None:
        yield f"{_no_manifest(model)[:1].upper()}{_no_manifest(model)[1:]}."
        return
    yield f"The manifest for {document['spec']['resources']['gpu']['product']} (-o manifest prints it alone):"
    yield ""
    yield to_yaml(document)


def _table(found: Sequence[Candidate], traffic: Traffic) -> Iterator[str]:
    if not found:
        yield "No GPU keeps the promise:"
        return
    priced = any(each.cost_per_hour is not None for each in found)
    costs = f"{'COST/h':>8}{'COST/1M':>9}" if priced else ""
    yield f"{'GPU':<19}{'REPLICAS':>8}{'GPUS':>6}{'REQ/S':>8}{'TTFT':>8}{'ITL':>8}{costs}  LIMITED BY"
    for each in found:
        if each.capacity is None or each.point is None:
            continue
        name = each.gpu.name if each.gpu_count == 1 else f"{each.gpu_count} x {each.gpu.name}"
        rate = each.capacity.requests_per_s
        row = f"{name:<19}{each.replicas:>8}{each.gpus:>6}{f'{rate:.2f}' if rate >= 1 else f'{rate:.2g}':>8}"
        row += f"{_time(each.point.ttft_p99_s):>8}{_time(each.point.itl_p99_s):>8}"
        if priced:
            per_million = each.cost_per_million_tokens(traffic)
            row += f"{_money(each.cost_per_hour):>8}{_money(per_million):>9}"
        yield f"{row}  {each.capacity.limited_by}{'' if each.servable else ', not yet servable'}"
    yield "REQ/S: what one replica sustains; TTFT, ITL: p99 at its share of the traffic"
    for problem in sorted({each.problem for each in found if each.problem}):
        yield f"{problem[:1].upper()}{problem[1:]}"
    if priced:
        yield "COST/1M: per million tokens of prompts and answers"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.{1 if seconds < 100 else 0}f} s"


def _money(amount: float | None) -> str:
    return "-" if amount is None else f"{amount:.2f}"


def _rate(text: str) -> float:
    return positive(text, text, "a number of requests per second, such as 20")


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except LengthsError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _share(text: str) -> float:
    value = 0.0 if text in {"0", "0.0"} else positive(text, text, "a share, 0 to 1")
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, 0 to 1")
    return value


def _price(text: str) -> tuple[str, float]:
    name, _, price = text.partition("=")
    try:
        return find_gpu(name).name, positive(price, text, "GPU=PRICE, such as l40s=1.9")
    except UnknownGPU as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _prices(given: Sequence[tuple[str, float]]) -> dict[str, float]:
    prices = dict(given)
    if len(prices) < len(given):
        raise CommandError("--price: a GPU has two prices, expected one each")
    return prices
