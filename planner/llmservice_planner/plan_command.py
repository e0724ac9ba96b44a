"""`llmservice plan`: what fits on which card, with the working."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import yaml

from llmservice_planner.command import Command, CommandError
from llmservice_planner.gpu import GIB, Device, UnknownGPU, cpu_device, find_gpu
from llmservice_planner.plan_table import gpu_table, plan_table
from llmservice_planner.shape import FIELD_NAMES, ModelShape, ShapeError, weights_bytes
from llmservice_planner.sizing import Plan, SizingError, SizingRequest, plan
from llmservice_planner.sizing_request import DTYPES, KV_DTYPES

_SECONDS = {"ms": 1e-3, "s": 1.0}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("the model").add_mutually_exclusive_group()
    what.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face model folder with its config.json")
    what.add_argument(
        "--shape", metavar="KEY=VALUE,…", help=f"the same figures without a folder; keys: {', '.join(FIELD_NAMES)}"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights; auto: the checkpoint's own")
    cards = parser.add_argument_group("the memory")
    cards.add_argument("--gpu", metavar="PRODUCT", help="a card of the catalogue, see --list-gpus")
    cards.add_argument("--gpu-count", type=int, default=1, metavar="N", help="cards that share the model")
    cards.add_argument("--cpu-memory", type=_size, metavar="SIZE", help="in place of --gpu: a container's memory, 8Gi")
    cards.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE", help="what of the memory may be used"
    )
    cards.add_argument("--list-gpus", action="store_true", help="print the catalogue and stop")
    _add_engine_arguments(parser.add_argument_group("the engine"))
    parser.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table", help="output format")


def _add_engine_arguments(engine: argparse._ArgumentGroup) -> None:
    engine.add_argument(
        "--max-model-len", type=int, metavar="N", help="longest prompt and answer together; default: the model's own"
    )
    engine.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="of the KV cache; auto: the weights'")
    engine.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="tokens of one KV block")
    engine.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, metavar="N", help="token budget of one step"
    )
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="your own number; default: the planner's")
    engine.add_argument(
        "--policy",
        choices=("guaranteed", "expected"),
        default="guaranteed",
        help="room for every sequence to reach max-model-len, or for what requests really use",
    )
    engine.add_argument(
        "--expected-tokens", type=int, metavar="N", help="what a request uses, prompt and answer, for policy expected"
    )
    engine.add_argument(
        "--keep-slid-blocks",
        action="store_true",
        help="count blocks behind a sliding window as held to the end, as this version's server holds them",
    )
    engine.add_argument("--itl-p99", type=_duration, metavar="TIME", help="promised time between tokens, such as 80ms")


def _run(args: argparse.Namespace) -> int:
    if args.list_gpus:
        print(gpu_table())
        return 0
    try:
        request = _request(args)
        answer = plan(request)
    except (ShapeError, SizingError, UnknownGPU) as error:
        raise CommandError(str(error)) from error
    print(_render(request, answer, args.output))
    return 0 if answer.fits else 1


def _request(args: argparse.Namespace) -> SizingRequest:
    shape = _shape(args)
    dtype = shape.dtype if args.dtype == "auto" else args.dtype
    return SizingRequest(
        shape=shape,
        device=_device(args),
        device_count=args.gpu_count,
        max_model_len=args.max_model_len,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        block_size=args.block_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_num_batched_tokens=args.max_num_batched_tokens,
        policy=args.policy,
        expected_tokens=args.expected_tokens,
        max_num_seqs=args.max_num_seqs,
        itl_p99_s=args.itl_p99,
        frees_slid_blocks=not args.keep_slid_blocks,
        weights_bytes=weights_bytes(args.model, dtype) if args.model is not None else None,
    )


def _shape(args: argparse.Namespace) -> ModelShape:
    if args.model is not None:
        return ModelShape.from_folder(args.model)
    if args.shape is None:
        raise CommandError("which model? give --model DIR or --shape layers=32,hiddenSize=4096,…")
    figures = {}
    for pair in args.shape.split(","):
        key, equals, value = pair.strip().partition("=")
        if not equals or not value:
            raise CommandError(f"--shape: {pair!r} is no KEY=VALUE; the keys are {', '.join(FIELD_NAMES)}")
        if key in figures:
            raise CommandError(f"--shape: {key} is given twice")
        figures[key] = value
    return ModelShape.from_fields(figures)


def _device(args: argparse.Namespace) -> Device:
    if (args.gpu is None) == (args.cpu_memory is None):
        raise CommandError("which memory? give either --gpu PRODUCT (see --list-gpus) or --cpu-memory SIZE")
    return find_gpu(args.gpu) if args.gpu is not None else cpu_device(args.cpu_memory)


def _render(request: SizingRequest, answer: Plan, output: str) -> str:
    if output == "json":
        return json.dumps(answer.to_dict(), indent=2)
    if output == "yaml":
        return yaml.safe_dump(answer.to_dict(), sort_keys=False, width=120).rstrip()
    return plan_table(request, answer)


def _size(text: str) -> int:
    """A Kubernetes memory quantity: 8Gi, 512Mi, 16G or plain bytes."""
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": GIB, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    number, factor = text, 1
    for suffix, size in units.items():
        if text.endswith(suffix):
            number, factor = text.removesuffix(suffix), size
            break
    size_bytes = _positive(number, text, "a size such as 8Gi") * factor
    if size_bytes >= 2**60:
        raise argparse.ArgumentTypeError(f"{text!r} is more memory than any machine has")
    return int(size_bytes)


def _duration(text: str) -> float:
    """Seconds, from 80ms, 2s or a plain number of seconds."""
    for suffix, seconds in _SECONDS.items():
        if text.endswith(suffix):
            return _positive(text.removesuffix(suffix), text, "a time such as 80ms") * seconds
    return _positive(text, text, "a time such as 80ms")


def _positive(number: str, text: str, expected: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value


COMMAND = Command(
    help="what fits on which card: KV blocks, max_num_seqs, and the working",
    add_arguments=_add_arguments,
    run=_run,
)
