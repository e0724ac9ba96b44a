"""`llmservice traffic FILE…`: statistics of recorded traffic, and the fields of a manifest that follow from them."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from llmservice_planner.capacity.plan import Targets, Traffic
from llmservice_planner.capacity.recommendations import Recommendation, of_replica, of_traffic
from llmservice_planner.charts import sparkline
from llmservice_planner.command import Command, CommandError, check_output, duration, whole_number, write_output
from llmservice_planner.commands.capacity import weights_of
from llmservice_planner.commands.traffic_report import html_report
from llmservice_planner.model.shape import ShapeError
from llmservice_planner.model.source import read_model
from llmservice_planner.sizing.gpu import UnknownGPU, find_gpu
from llmservice_planner.sizing.request import SizingError, SizingRequest
from llmservice_planner.traffic.summary import STATIC_BATCH, Statistics, summarise
from llmservice_planner.traffic.traces import FORMATS, TraceError, iter_requests

_STANDARD_INPUT = Path("/dev/stdin")
_WIDTH = 100


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=lambda text: _STANDARD_INPUT if text == "-" else Path(text),
        metavar="FILE",
        help="a trace (Azure 2023 or 2024, BurstGPT, Mooncake), OpenAI responses as JSON lines, or the server's log; "
        "- is standard input: kubectl logs deploy/NAME | llmservice traffic -",
    )
    parser.add_argument("--format", choices=FORMATS, help="of the files; default: by their first line")
    parser.add_argument("--window", type=duration, metavar="TIME", help="of rates over time; default: by the duration")
    parser.add_argument(
        "--static-batch",
        type=whole_number,
        default=STATIC_BATCH,
        metavar="N",
        help="requests of a static batch, for padding",
    )
    replica = parser.add_argument_group("a replica, for token budget, targets and replicas")
    replica.add_argument("--model", metavar="MODEL", help="a folder, org/name on the hub, or a URI of the CRD")
    replica.add_argument("--gpu", metavar="PRODUCT", help="a GPU of the catalogue, see `llmservice plan --list-gpus`")
    replica.add_argument("--ttft-p99", type=duration, metavar="TIME", help="target; default: it is recommended")
    replica.add_argument("--itl-p99", type=duration, metavar="TIME", help="target; default: it is recommended")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="output format")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a report with plots (extra: plots)")


def _run(args: argparse.Namespace) -> int:
    if (args.model is None) != (args.gpu is None):
        raise CommandError("a replica needs both --model and --gpu")
    if args.model is None and (args.ttft_p99 or args.itl_p99):
        raise CommandError("targets are about a replica: give --model and --gpu as well")
    check_output(args.html)
    try:
        statistics = summarise(
            iter_requests(args.files, args.format), window_s=args.window, static_batch=args.static_batch
        )
        recommended = _recommend(args, statistics)
    except (TraceError, ShapeError, SizingError, UnknownGPU) as error:
        raise CommandError(str(error)) from error
    if args.html is not None:
        names = ", ".join(path.name for path in args.files)
        write_output(args.html, html_report(names, statistics, [*findings(statistics)], recommended))
    if args.output == "json":
        answer = statistics.to_dict() | {"recommendations": [asdict(each) for each in recommended]}
        print(json.dumps(answer, indent=2))
    else:
        print("\n".join(_text(statistics, recommended, with_replica=args.model is not None)))
    return 0


def _recommend(args: argparse.Namespace, statistics: Statistics) -> list[Recommendation]:
    traffic = Traffic(max(statistics.loads), statistics.pairs(), statistics.cached_share or 0.0)
    if args.model is None:
        return of_traffic(statistics, traffic)
    model = read_model(args.model)
    longest = model.shape.max_position_embeddings or traffic.max_model_len
    request = SizingRequest(
        shape=model.shape,
        device=find_gpu(args.gpu),
        max_model_len=min(traffic.max_model_len, longest),
        expected_tokens=min(traffic.expected_tokens, longest),
        itl_p99_s=args.itl_p99,
        weights_bytes=weights_of(model, "auto", "auto"),
    )
    found = of_replica(statistics, traffic, request, Targets(args.ttft_p99, args.itl_p99))
    if found is None:
        raise CommandError(
            f"on {args.gpu} the model does not fit, no request meets the targets, or so few are held at once that "
            "their waits have no bound: compare the GPUs with `llmservice plan --trace`",
            status=1,
        )
    return found


def _text(statistics: Statistics, recommended: Sequence[Recommendation], *, with_replica: bool) -> Iterator[str]:
    windows = statistics.windows
    yield (
        f"{statistics.requests} requests in {_span(statistics.duration_s)}: {statistics.requests_per_s:.2f} a second, "
        f"{windows.peak:.2f} in the busiest {windows.window_s:g} s ({statistics.peak_to_mean:.2f} x the mean)"
    )
    yield ""
    yield f"  {'TOKENS':<22}{'mean':>8}{'p50':>8}{'p90':>8}{'p95':>8}{'p99':>8}{'max':>9}"
    for name, each in (("prompt", statistics.prompt), ("output", statistics.output), ("together", statistics.total)):
        row = "".join(f"{value:>8}" for value in (each.p50, each.p90, each.p95, each.p99))
        yield f"  {name:<22}{each.mean:>8.0f}{row}{each.longest:>9}"
    yield ""
    yield f"  requests/s, each {windows.window_s:g} s    {sparkline(windows.requests_per_s, 60)}"
    yield f"  output tokens/s          {sparkline(windows.output_tokens_per_s, 60)}"
    yield ""
    yield from (f"  {name:<22}{text}" for name, text in findings(statistics))
    yield ""
    yield "Recommended:"
    for field in recommended:
        yield f"  {field.field}: {field.value}"
        yield textwrap.fill(field.reason, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    if not with_replica:
        yield ""
        yield "With --model and --gpu: a token budget by the GPU, latency targets and replicas."


def findings(statistics: Statistics) -> Iterator[tuple[str, str]]:
    """What the figures mean, as names and sentences; of the text and of the report."""
    if statistics.gap_variation is not None:
        yield "gaps", f"coefficient of variation {statistics.gap_variation:.2f} (Poisson: 1, burstier: above)"
    windows = statistics.windows
    yield (
        "dispersion",
        f"{windows.dispersion:.1f} over {windows.window_s:g} s: variance over mean of counts (Poisson: 1)",
    )
    if statistics.shared_prefix_share is not None:
        yield "shared prefixes", f"{statistics.shared_prefix_share:.1%} of prompt tokens, with a cache without bound"
    if statistics.cached_share is not None:
        yield "cached", f"{statistics.cached_share:.1%} of prompt tokens, as recorded"
    if statistics.shared_prefix_share is None and statistics.cached_share is None:
        yield "shared prefixes", "not recorded in these files"
    share = statistics.static_padding_share
    yield "static batching", f"{share:.0%} of the token slots would be padding, in batches of {statistics.static_batch}"
    if statistics.predicted_order_share is not None:
        share = statistics.predicted_order_share
        yield "output prediction", f"orders {share:.0%} of the pairs at most 50 requests apart rightly (chance: 50%)"


def _span(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} seconds"


COMMAND = Command(
    help="statistics of recorded traffic: lengths, burstiness, shared prefixes; recommends fields of a manifest",
    add_arguments=_add_arguments,
    run=_run,
)
