"""`llmservice plan`: sizes a model for a GPU or a CPU and prints the plan."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmservice_planner.capacity.manifest import to_yaml
from llmservice_planner.charts import NO_MATPLOTLIB, ChartError, check_path, has_matplotlib, write
from llmservice_planner.command import Command, CommandError, duration, json_object, positive
from llmservice_planner.commands.capacity import add_traffic_arguments, is_asked, plan_capacity, weights_of
from llmservice_planner.model.quantization import QUANTIZATIONS
from llmservice_planner.model.shape import FIELD_NAMES, ModelShape, ShapeError
from llmservice_planner.model.source import ModelFigures, read_model
from llmservice_planner.sizing.budget import Budget
from llmservice_planner.sizing.curve import Curve, TypicalRequest, curve, curve_text, draw_curve, most_sequences
from llmservice_planner.sizing.explanation import format_bytes
from llmservice_planner.sizing.gpu import CPU, GIB, GPUS, Device, UnknownGPU, find_gpu
from llmservice_planner.sizing.latency import LatencyError, LatencyModel
from llmservice_planner.sizing.plan import Plan, SizingError, SizingRequest, plan
from llmservice_planner.sizing.prediction_error import (
    MeasurementError,
    Prediction,
    predictions,
    predictions_text,
    read_report,
)
from llmservice_planner.sizing.request import DTYPES, KV_DTYPES
from llmservice_planner.sizing.workload import WORKLOADS, for_workload


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("the model").add_mutually_exclusive_group()
    what.add_argument(
        "--model",
        metavar="MODEL",
        help="a Hugging Face model folder, org/name on the hub (token: $HF_TOKEN, mirror: $HF_ENDPOINT), or a URI of "
        "the CRD (hf://, s3://, file://), of which config.json and the size of the weights are read",
    )
    what.add_argument(
        "--shape", metavar="KEY=VALUE,…", help=f"the dimensions without a folder; keys: {', '.join(FIELD_NAMES)}"
    )
    parser.add_argument(
        "--config-overrides",
        type=json_object,
        metavar="JSON",
        help='of the model\'s config.json, as a JSON merge patch: {"rope_scaling": {"rope_type": "yarn", …}}',
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights; auto: the checkpoint's")
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default="auto",
        help="of weights in memory: int8 quantises a plain checkpoint at load, dense dequantises a quantised one",
    )
    memory = parser.add_argument_group("the memory")
    memory.add_argument(
        "--gpu", metavar="PRODUCT", action="append", help="a GPU of the catalogue, see --list-gpus; several with --rate"
    )
    memory.add_argument("--gpu-count", type=int, default=1, metavar="N", help="GPUs that share the model")
    memory.add_argument("--cpu-memory", type=_size, metavar="SIZE", help="instead of --gpu: a container's memory")
    memory.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of the memory that may be used",
    )
    memory.add_argument("--list-gpus", action="store_true", help="print the catalogue and exit")
    _add_engine_arguments(parser.add_argument_group("the engine"))
    _add_curve_arguments(parser.add_argument_group("the curve"))
    parser.add_argument(
        "--measured",
        metavar="FILE",
        help="a server's answer to GET /sizing, or - for standard input: show how far the plan is from it",
    )
    add_traffic_arguments(parser.add_argument_group("the traffic, for replicas of each GPU, costs and a manifest"))
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json", "yaml", "manifest"),
        default="table",
        help="output format; manifest, with --rate: the LLMService alone, for kubectl apply -f -",
    )


def _add_engine_arguments(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument(
        "--max-model-len", type=int, metavar="N", help="longest prompt and answer together; default: the model's"
    )
    engine.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="of the KV cache; auto: the weights'")
    engine.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="tokens of one KV block")
    engine.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="token budget of one step; default: by the GPU's memory"
    )
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="default: the planner's result")
    engine.add_argument(
        "--expected-tokens", type=int, metavar="N", help="prompt and answer of a typical request; default: 1536"
    )
    engine.add_argument(
        "--workload", choices=WORKLOADS, help="what the service is for: chooses the settings that no flag sets"
    )
    engine.add_argument(
        "--max-loras", type=int, default=0, metavar="N", help="LoRA adapters in memory at once; default: none"
    )
    engine.add_argument("--max-lora-rank", type=int, default=16, metavar="RANK", help="of an adapter, at most")
    engine.add_argument(
        "--lora-experts", action="store_true", help="adapters may change a mixture's experts, which takes more memory"
    )
    engine.add_argument(
        "--itl-p99", type=duration, metavar="TIME", help="target for the time between tokens, such as 80ms"
    )


def _add_curve_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--curve", action="store_true", help="show tokens/s, ITL and TTFT over the batch size instead")
    group.add_argument("--curve-out", type=Path, metavar="FILE", help="also plot the curve, as .svg or .png")
    group.add_argument(
        "--latency", type=Path, metavar="FILE", help="a latency model of `calibrate -o`, in place of the GPU's defaults"
    )
    group.add_argument(
        "--ttft-p99", type=duration, metavar="TIME", help="target for the time to the first token, such as 1s"
    )


def _run(args: argparse.Namespace) -> int:
    if args.list_gpus:
        print(_catalogue(args.output))
        return 0
    try:
        is_capacity = is_asked(args)
        if args.measured is not None and (is_capacity or args.curve or args.curve_out):
            raise CommandError("--measured compares a plan for one device: leave out --rate, --trace and --curve")
        if is_capacity:
            return plan_capacity(args, _model(args), _settings(args))
        if args.output == "manifest":
            raise CommandError("which traffic? -o manifest needs --rate or --trace, which give the replicas")
        request = _request(args)
        answer = plan(request)
        if answer.fits and (args.curve or args.curve_out):
            return _run_curve(args, request)
        compared = None if args.measured is None else _compared(args, request, answer)
    except (ShapeError, SizingError, UnknownGPU, LatencyError, ChartError) as error:
        raise CommandError(str(error)) from error
    print(_render(request, answer, args.output, compared))
    return 0 if answer.fits else 1


def _compared(args: argparse.Namespace, request: SizingRequest, answer: Plan) -> list[Prediction]:
    """The plan against what a server has measured."""
    latency = Budget.of(request).latency if args.latency is None else LatencyModel.read(args.latency)
    try:
        text = sys.stdin.read() if args.measured == "-" else Path(args.measured).read_text()
        return predictions(answer, latency, read_report(text))
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--measured {args.measured} cannot be read: {error}") from error
    except MeasurementError as error:
        raise CommandError(
            f"--measured {args.measured}: {error}; expected is what `curl URL/sizing` prints of a server"
        ) from error


def _run_curve(args: argparse.Namespace, request: SizingRequest) -> int:
    """The status is 1 where not even one sequence meets the targets."""
    if args.curve_out is not None:
        check_path(args.curve_out)
    found = _curve(args, request)
    if args.output == "table":
        print(curve_text(found))
    else:
        print(json.dumps(found.to_dict(), indent=2) if args.output == "json" else to_yaml(found.to_dict()))
    if args.curve_out is not None:
        write(draw_curve(found), args.curve_out)
        if args.output == "table":
            print(f"\nplotted to {args.curve_out}")
    elif args.output == "table":
        print(f"\n--curve-out FILE.svg plots it{'' if has_matplotlib() else f'; {NO_MATPLOTLIB}'}")
    return 1 if found.within_slo == 0 else 0


def _curve(args: argparse.Namespace, request: SizingRequest) -> Curve:
    budget = Budget.of(request)
    model = budget.latency if args.latency is None else LatencyModel.read(args.latency)
    if request.shape.is_encoder:
        raise CommandError("--curve shows how fast a model decodes, and an encoder generates nothing: leave it out")
    if model is None:
        raise CommandError(
            f"the rates of {request.device.name} are not known: measure a server with llmservice calibrate -o FILE, "
            "and give --latency FILE"
        )
    typical = _typical(args, request, budget.step.chunk)
    most, why = most_sequences(budget, typical)
    count = f"{request.device_count} x " if request.device_count > 1 else ""
    source = "" if args.latency is None else f", {args.latency.name}"
    title = f"{request.shape.architecture} on {count}{request.device.name}{source}"
    return curve(model, typical, most, why, title=title, itl_p99_s=args.itl_p99, ttft_p99_s=args.ttft_p99)


def _typical(args: argparse.Namespace, request: SizingRequest, chunk_tokens: int) -> TypicalRequest:
    """The means of the given lengths, or a request of the expected tokens."""
    given = (args.prompt_tokens, args.output_tokens)
    if given == (None, None):
        return TypicalRequest.of(request.typical_tokens, chunk_tokens)
    if None in given:
        raise CommandError("the curve needs both lengths of a request or none: --prompt-tokens and --output-tokens")
    prompt, output = (round(sum(points) / len(points)) for points in (lengths.points() for lengths in given))
    if prompt + output > request.model_len:
        raise CommandError(
            f"prompts of {prompt} tokens and answers of {output} on average are longer than max_model_len "
            f"{request.model_len}: lower them, or give --max-model-len"
        )
    return TypicalRequest(prompt, output, chunk_tokens)


def _request(args: argparse.Namespace) -> SizingRequest:
    model = _model(args)
    request = SizingRequest(
        shape=model.shape,
        device=_device(args),
        device_count=args.gpu_count,
        weights_bytes=weights_of(model, args.dtype, args.quantization),
        **_settings(args),
    )
    return for_workload(request, args.workload)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a `SizingRequest` that have flags of their own names."""
    names = (
        "max_model_len dtype kv_dtype quantization block_size gpu_memory_utilization max_num_batched_tokens "
        "expected_tokens max_num_seqs max_loras max_lora_rank lora_experts"
    )
    return {name: getattr(args, name) for name in names.split()} | {"itl_p99_s": args.itl_p99}


def _model(args: argparse.Namespace) -> ModelFigures:
    if args.model is not None:
        return read_model(args.model, args.config_overrides)
    if args.config_overrides:
        raise CommandError("--config-overrides are of --model's config.json: change --shape itself")
    if args.shape is None:
        raise CommandError("which model? give --model MODEL or --shape layers=32,hiddenSize=4096,…")
    figures = {}
    for pair in args.shape.split(","):
        key, equals, value = pair.strip().partition("=")
        if not equals or not value:
            raise CommandError(f"--shape: {pair!r} is not KEY=VALUE; the keys are {', '.join(FIELD_NAMES)}")
        if key in figures:
            raise CommandError(f"--shape: {key} is given twice")
        figures[key] = value
    return ModelFigures(ModelShape.from_fields(figures))


def _device(args: argparse.Namespace) -> Device:
    if (args.gpu is None) == (args.cpu_memory is None):
        raise CommandError("which memory? give either --gpu PRODUCT (see --list-gpus) or --cpu-memory SIZE")
    if args.gpu is None:
        return CPU(args.cpu_memory)
    if len(args.gpu) > 1:
        raise CommandError("which GPU? several need --rate or --trace, by which they are compared")
    return find_gpu(args.gpu[0])


def _render(request: SizingRequest, answer: Plan, output: str, compared: Sequence[Prediction] | None) -> str:
    """`compared`: what a server has measured; None: nothing is compared."""
    if output == "table":
        table = plan_table(request, answer)
        return table if compared is None else f"{table}\n\n{predictions_text(compared)}"
    content = answer.to_dict()
    if compared is not None:
        content["predictions"] = [asdict(each) | {"errorRatio": each.error_ratio} for each in compared]
    return json.dumps(content, indent=2) if output == "json" else to_yaml(content)


def _size(text: str) -> int:
    """A Kubernetes memory quantity: 8Gi, 512Mi, 16G or plain bytes."""
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": GIB, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    number, factor = text, 1
    for suffix, size in units.items():
        if text.endswith(suffix):
            number, factor = text.removesuffix(suffix), size
            break
    size_bytes = positive(number, text, "a size such as 8Gi") * factor
    if size_bytes >= 2**60:
        raise argparse.ArgumentTypeError(f"{text!r} is more memory than any machine has")
    return int(size_bytes)


_WIDTH = 100
_BAR = 60


def plan_table(request: SizingRequest, answer: Plan) -> str:
    """The plan as text of at most 100 columns: the result, a bar of the memory, and `answer.explanation`."""
    lines = [_headline(request, answer), ""]
    if answer.fits:
        lines += [*_memory_bar(request, answer), ""]
    lines += _working(answer)
    if answer.remedies:
        lines += ["", "What would make it fit, each alone:"]
        lines += [f"  - {remedy}" for remedy in answer.remedies]
    elif not answer.fits:
        lines += ["", "Nothing in the catalogue makes it fit: choose a smaller model."]
    return "\n".join(lines)


def _catalogue(output: str) -> str:
    if output == "manifest":
        raise CommandError("--list-gpus makes no manifest: leave out -o manifest")
    if output == "table":
        return gpu_table()
    gpus = [asdict(gpu) for gpu in GPUS.values()]
    return json.dumps(gpus, indent=2) if output == "json" else to_yaml(gpus)


def gpu_table() -> str:
    """The catalogue: the usable memory and the dense rates of each GPU."""
    lines = [f"{'PRODUCT':<16}{'MEMORY GiB':>11}{'GB/s':>7}{'BF16 TFLOP/s':>14}{'FP8 TFLOP/s':>13}  NODE LABEL"]
    for gpu in GPUS.values():
        bandwidth = _rate(gpu.bandwidth_bytes_per_s, 1e9)
        half, fp8 = _rate(gpu.flops_16bit, 1e12), _rate(gpu.flops_fp8, 1e12)
        lines.append(
            f"{gpu.name:<16}{gpu.memory_bytes / GIB:>11.2f}{bandwidth:>7}{half:>14}{fp8:>13}  {gpu.node_labels[0]}"
        )
    return "\n".join(lines)


def _rate(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.0f}"


def _headline(request: SizingRequest, answer: Plan) -> str:
    count = f"{request.device_count} x " if request.device_count > 1 else ""
    where = f"on {count}{request.device.name}"
    if not answer.fits:
        return f"DOES NOT FIT {where}: {format_bytes(answer.shortfall_bytes)} are missing"
    if not answer.kv_bytes_per_token:
        held = f"{answer.guaranteed_sequences} of {answer.max_model_len} tokens"
        return f"FITS {where}: at most {answer.max_num_seqs} inputs in a step, {held}; an encoder has no KV cache"
    held = f"{answer.guaranteed_sequences} of {answer.max_model_len} tokens or {answer.expected_sequences} typical ones"
    return f"FITS {where}: at most {answer.max_num_seqs} sequences in a step, memory for {held}"


def _memory_bar(request: SizingRequest, answer: Plan) -> Iterator[str]:
    total = request.device_count * request.device.memory_bytes
    spent = answer.weights_bytes + answer.overhead_bytes + answer.kv_pool_bytes
    parts = (
        ("weights", "W", answer.weights_bytes),
        ("overhead", "o", answer.overhead_bytes),
        ("KV cache", "k", answer.kv_pool_bytes),
        ("unused", ".", total - spent),
    )
    edges = [0]
    for _, _, size in parts:
        edges.append(edges[-1] + size)
    columns = [round(edge * _BAR / total) for edge in edges]
    bar = "".join(mark * (columns[i + 1] - columns[i]) for i, (_, mark, _) in enumerate(parts))
    yield f"  [{bar}]"
    yield "  " + "   ".join(f"{mark} {name} {format_bytes(size)}" for name, mark, size in parts)


def _working(answer: Plan) -> Iterator[str]:
    pairs = [line.split(": ", 1) for line in answer.explanation]
    width = max(len(label) for label, _ in pairs)
    previous = ""
    for label, text in pairs:
        shown = label if label != previous else ""
        previous = label
        indent = " " * (width + 4)
        yield textwrap.fill(text, _WIDTH, initial_indent=f"  {shown:<{width}}  ", subsequent_indent=indent)


COMMAND = Command(
    help="size a model on a GPU or CPU, with an explanation; with --rate: replicas of each GPU, costs and a manifest",
    add_arguments=_add_arguments,
    run=_run,
)
