"""`llmservice calibrate`: fits the planner's latency model to a running server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmservice_bench.bench_command import server_root
from llmservice_planner.command import Command, CommandError, check_output, count, number, whole_number, write_output
from llmservice_planner.model.shape import ModelShape, ShapeError
from llmservice_planner.sizing.gpu import UnknownGPU, find_gpu
from llmservice_planner.sizing.latency import LatencyModel

if TYPE_CHECKING:
    import aiohttp

    from llmservice_bench.calibration.fit import Fit
    from llmservice_bench.calibration.measure import Limits, Measurement

_STEP_TOKENS = 2048
_MAX_NUM_SEQS, _MAX_MODEL_LEN = 64, 4096
"""Of a server that reports neither."""
_POOR = 0.25
"""A median error of a kind of step above it makes the exit status 1: the model does not describe the server."""

_DESCRIPTION = """\
Drive a running server for under a minute with decode batches of several sizes and contexts, prompts of several lengths
and both at once; fit the coefficients of the planner's latency model to the times of its steps; print them with the
errors of the fit. `llmservice plan --curve --latency FILE` and `llmservice simulate --latency FILE` read the result.
Nothing else should use the server meanwhile."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--url", type=server_root, required=True, help="of the server, with or without /v1")
    parser.add_argument("--model", help="the served model's name; default: the first of /v1/models")
    parser.add_argument(
        "--metrics-url",
        metavar="URL",
        help="where a server of ours answers GET /sizing, if not at --url",
    )
    parser.add_argument("--seconds", type=number, default=45.0, help="measure for about so long (default: 45)")
    parser.add_argument("--max-num-seqs", type=whole_number, metavar="N", help="largest batch; default: the server's")
    parser.add_argument(
        "--step-tokens",
        type=whole_number,
        default=_STEP_TOKENS,
        metavar="N",
        help="prompt tokens that a step computes at most, for servers that are not ours (default: 2048)",
    )
    parser.add_argument(
        "--model-folder",
        metavar="DIR",
        type=Path,
        help="the model's folder, for servers that are not ours: mixtures of experts and sliding windows need it",
    )
    parser.add_argument("--gpu", metavar="PRODUCT", help="also print how far the planner's default for this GPU is off")
    parser.add_argument("--gpu-count", type=whole_number, default=1, metavar="N", help="GPUs that share the model")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    parser.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="environment variable that holds the API key"
    )
    parser.add_argument("--seed", type=count, default=0, help="of the prompts' words")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the model as JSON")


@dataclass(frozen=True, slots=True)
class _Calibrated:
    model_name: str
    limits: Limits
    measured: Measurement
    fit: Fit
    seconds: float
    expected: LatencyModel | None
    """The planner's default for the given GPU."""


def _run(args: argparse.Namespace) -> int:
    from llmservice_bench.calibration.fit import TooFewSamplesError
    from llmservice_bench.client import TargetError

    check_output(args.output)
    try:
        found = asyncio.run(_calibrate(args))
    except (TargetError, ShapeError, UnknownGPU) as error:
        raise CommandError(str(error)) from error
    except TooFewSamplesError as error:
        raise CommandError(f"{error}: give more --seconds, or a server that is not busy") from error
    print(_report(args, found))
    if args.output is not None:
        write_output(args.output, json.dumps(_file(args, found), indent=2) + "\n")
        print(f"\nwritten to {args.output}")
    poor = [kind for kind, errors in found.fit.held_out.items() if errors.median > _POOR]
    if poor:
        print(f"\nthe model does not describe {' and '.join(poor)} steps of this server: measure it while it is idle")
    return 1 if poor else 0


async def _calibrate(args: argparse.Namespace) -> _Calibrated:
    import aiohttp
    from rich.console import Console

    from llmservice_bench.calibration.fit import TooFewSamplesError, fit
    from llmservice_bench.calibration.measure import measure
    from llmservice_bench.client import Target, TargetError

    key = os.environ.get(args.api_key_env)
    headers = (("Authorization", f"Bearer {key}"),) if key else ()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        name, max_model_len = await _served(session, args, dict(headers))
        sizing_url, sizing = await _sizing(session, args)
        shape = _shape(args, sizing)
        limits = _limits(args, sizing, max_model_len)
        expected = _expected(args, shape, sizing)
        target = Target(args.url, name, chat=args.chat, ignore_eos=True, headers=headers)
        began = time.perf_counter()
        with Console(stderr=True).status("") as status:  # shown on a terminal only
            measured = await measure(
                session,
                target,
                limits,
                seconds=args.seconds,
                steps_url=sizing_url,
                seed=args.seed,
                on_phase=lambda phase: status.update(f"measuring {name}: {phase}"),
            )
        seconds = time.perf_counter() - began
    try:
        fitted = fit(measured.samples, _known(shape))
    except TooFewSamplesError as error:
        if measured.failures:
            raise TargetError(f"{error}, and requests failed: {_listed(measured.failures)}") from error
        raise
    return _Calibrated(name, limits, measured, fitted, seconds, expected)


async def _served(
    session: aiohttp.ClientSession, args: argparse.Namespace, headers: Mapping[str, str]
) -> tuple[str, int | None]:
    """The model's name, and its longest request if the server says."""
    import aiohttp

    from llmservice_bench.client import TargetError

    url = f"{args.url.rstrip('/')}/v1/models"
    try:
        async with session.get(url, headers=headers) as response:
            if response.status != 200:
                raise TargetError(f"{url} answered {response.status}: {(await response.text())[:200]}")
            listed = (await response.json(content_type=None))["data"]
            models = {str(each["id"]): each.get("max_model_len") for each in listed}
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TargetError(f"cannot reach {url} ({error}): give the root of a running server as --url") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TargetError(f"{url} lists no models: is it the root of an OpenAI-compatible server?") from error
    if not models:
        raise TargetError(f"{url} lists no model: wait until one is served there")
    name = args.model or next(iter(models))
    if name not in models:
        raise TargetError(f"{url} lists {', '.join(models)}, not {name}: give one of them as --model")
    length = models[name]
    return name, length if isinstance(length, int) else None


async def _sizing(session: aiohttp.ClientSession, args: argparse.Namespace) -> tuple[str | None, Mapping[str, Any]]:
    """Where a server of ours reports its steps, and its report; None and nothing for another server."""
    from llmservice_bench.calibration.server_steps import fetch_report
    from llmservice_bench.client import TargetError

    root = (args.metrics_url or args.url).rstrip("/").removesuffix("/metrics")
    report = await fetch_report(session, f"{root}/sizing")
    if report is None:
        if args.metrics_url:
            raise TargetError(f"{root}/sizing does not answer as a server of ours: leave out --metrics-url")
        return None, {}
    return (f"{root}/sizing" if "steps" in report else None), report


def _limits(args: argparse.Namespace, sizing: Mapping[str, Any], max_model_len: int | None) -> Limits:
    from llmservice_bench.calibration.measure import Limits

    served = int(sizing.get("max_num_seqs", _MAX_NUM_SEQS))
    length = int(sizing.get("max_model_len", max_model_len or _MAX_MODEL_LEN))
    if length < 256:
        raise CommandError(f"the server takes {length} tokens of prompt and answer, at least 256 are needed to measure")
    return Limits(min(served, args.max_num_seqs or served), length, args.step_tokens)


def _shape(args: argparse.Namespace, sizing: Mapping[str, Any]) -> ModelShape | None:
    if args.model_folder is not None:
        return ModelShape.from_folder(args.model_folder)
    return ModelShape.from_fields(sizing["shape"]) if sizing.get("shape") else None


def _known(shape: ModelShape | None) -> LatencyModel:
    """What follows from the shape: experts and windows; nothing of an unknown one, which is taken for a dense model."""
    found = None if shape is None else _default(shape, "h200-141gb", 1, None)
    dense = LatencyModel(0, 0, 0, 0, 0, 0)
    return dense if found is None else found


def _default(shape: ModelShape, gpu: str, count: int, weights_bytes: int | None) -> LatencyModel | None:
    dtype = shape.dtype
    if weights_bytes is None:
        weights_bytes = shape.weights_bytes(dtype)
    kv_bytes = shape.kv_bytes_per_token(dtype, count)
    return LatencyModel.of(shape, find_gpu(gpu), count, dtype, weights_bytes, kv_bytes)


def _expected(args: argparse.Namespace, shape: ModelShape | None, sizing: Mapping[str, Any]) -> LatencyModel | None:
    if args.gpu is None:
        return None
    find_gpu(args.gpu)
    if shape is None:
        raise CommandError(
            "--gpu compares with the planner's default, which needs the model's folder: give --model-folder DIR"
        )
    return _default(shape, args.gpu, args.gpu_count, sizing.get("memory_bytes", {}).get("weights"))


_MEANING = {
    "step_s": "per step",
    "mixed_s": "per step with prompt tokens, beside it",
    "sequence_s": "per sequence in a step",
    "weights_s": "reading all weights once",
    "token_s": "arithmetic of a token",
    "kv_token_s": "reading the keys and values of a token",
    "pair_s": "attention of a prompt's token to another",
}


def _report(args: argparse.Namespace, found: _Calibrated) -> str:
    """The result as text."""
    measured, model = found.measured, found.fit.model
    source = "the server's own step times" if measured.from_server else "the times of its answers"
    counts = f"{len(measured.samples)} samples of {len(measured.done)} compositions in {found.seconds:.0f} s"
    lines = [f"{found.model_name} at {args.url}: {counts}, from {source}", ""]
    lines += [f"  {name:<12}{_time(getattr(model, name)):>12}  {text}" for name, text in _MEANING.items()]
    lines += [
        f"  {'request':<12}{_time(found.fit.request_s):>12}  per request outside of steps: HTTP, tokenizer, queue"
    ]
    ridge = model.ridge_tokens
    if ridge is not None and ridge > 1:
        lines += ["", f"  from {ridge} tokens in a step on, arithmetic takes longer than reading the weights"]
    lines += ["", f"  {'error of':<10}{'samples':>9}{'median':>9}{'p90':>9}   held out: {'median':>7}{'p90':>9}"]
    for kind, errors in found.fit.errors.items():
        held = found.fit.held_out[kind]
        fitted = f"  {kind:<10}{errors.count:>9}{errors.median:>9.1%}{errors.p90:>9.1%}"
        lines.append(f"{fitted}   {held.median:>17.1%}{held.p90:>9.1%}")
    if found.expected is not None:
        lines += ["", f"  the planner's default for {args.gpu_count} x {args.gpu} takes, of the measured time:"]
        lines += [f"  {kind:<10}{ratio:>9.0%}" for kind, ratio in _ratios(found, found.expected).items()]
    if measured.skipped:
        lines += ["", f"  {len(measured.skipped)} compositions would have taken too long: {measured.skipped[0]}, …"]
    if measured.failures:
        lines.append(f"  requests failed: {_listed(measured.failures)}")
    return "\n".join(lines)


def _listed(failures: Mapping[str, int]) -> str:
    return ", ".join(f"{failed} x {reason}" for reason, failed in failures.items())


def _ratios(found: _Calibrated, expected: LatencyModel) -> dict[str, float]:
    """By kind of step, the median of predicted / measured."""
    from statistics import median

    from llmservice_bench.calibration.fit import KINDS, predicted

    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for sample in found.measured.samples:
        ratios[sample.kind].append(predicted(expected, found.fit.request_s, sample) / sample.seconds)
    return {kind: median(values) for kind, values in ratios.items() if values}


def _file(args: argparse.Namespace, found: _Calibrated) -> dict[str, Any]:
    errors = {
        kind: {"samples": each.count, "median": each.median, "p90": each.p90} for kind, each in found.fit.errors.items()
    }
    held_out = {kind: {"median": each.median, "p90": each.p90} for kind, each in found.fit.held_out.items()}
    return {
        **found.fit.model.to_dict(),
        "calibration": {
            "url": args.url,
            "model": found.model_name,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "limits": asdict(found.limits),
            "request_s": found.fit.request_s,
            "from_server": found.measured.from_server,
            "errors": errors,
            "held_out": held_out,
        },
    }


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


COMMAND = Command(
    help="fit the planner's latency model to a running server",
    add_arguments=_add_arguments,
    run=_run,
    extra="bench",
    requires=("aiohttp", "numpy", "rich"),
)
