"""`llmservice serve`: the inference server of one pod."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmservice_planner.command import Command, CommandError
from llmservice_planner.shape import ModelShape, ShapeError

if TYPE_CHECKING:
    from llmservice_server.api.backlog import QueueBound

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_DTYPES = ("auto", "bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_http_arguments(parser)
    _add_engine_arguments(parser)


def _add_http_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="folder of a checkpoint in Hugging Face's format")
    add(
        "--served-model-name",
        action="extend",
        nargs="+",
        metavar="NAME",
        help="what clients put in `model`; several are aliases (default: the folder's name)",
    )
    add("--host", default=os.environ.get("LLMSERVICE_HOST", "0.0.0.0"), help="address to listen on, $LLMSERVICE_HOST")
    add("--port", type=_port, default=8000, help="port to listen on; 0 takes a free one and logs it")
    add(
        "--metrics-port",
        type=_port,
        default=8001,
        metavar="PORT",
        help="port of /metrics; the same as --port serves both there, 0 takes a free one and logs it",
    )
    _add_queue_arguments(parser)
    add("--max-queued-embeddings", type=_count, default=4096, help="inputs of /v1/embeddings that may wait, likewise")
    add("--request-timeout", type=_duration, default=600.0, metavar="SECONDS", help="deadline of a request; 0 for none")
    add(
        "--queue-timeout",
        type=_duration,
        default=0.0,
        metavar="SECONDS",
        help="of it, at most before the request is first computed; 0 for all of it",
    )
    add(
        "--drain-timeout",
        type=_duration,
        default=60.0,
        metavar="SECONDS",
        help="time after SIGTERM to finish what runs",
    )
    add(
        "--otlp-endpoint",
        metavar="URL",
        help="collector to send traces to, such as http://otel:4318 (default: $OTEL_EXPORTER_OTLP_ENDPOINT, if any)",
    )
    add(
        "--stuck-timeout",
        type=_duration,
        default=300.0,
        metavar="SECONDS",
        help="an engine that has work and finishes no step for so long is killed, and the server ends; 0 for never",
    )
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="one KEY, KEY:LANE or KEY:LANE:NAME a line, the lane being the highest it may choose (default: no keys)",
    )
    add(
        "--body-timeout",
        type=_duration,
        default=60.0,
        metavar="SECONDS",
        help="for a request's body to be complete, else 408; 0 for none",
    )
    add(
        "--max-body-size",
        type=_memory,
        metavar="BYTES",
        help="larger requests get 413 (default: 1 MiB and 64 bytes for each token of --max-model-len)",
    )
    add("--metrics-prefix", type=_prefix, default="llmservice_", help='of the names in /metrics; "vllm:" for vLLM\'s')
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="JSON lines on standard output",
    )


def _add_queue_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--default-lane",
        choices=("interactive", "batch"),
        default="interactive",
        help="of requests, and the highest that they may choose, where their API key has no lane of its own",
    )
    add(
        "--max-queued-requests",
        type=_count,
        default=512,
        metavar="N",
        help="bound of the interactive lane's queue, in sequences; from 80%% of it on more are refused with 429",
    )
    add(
        "--max-queued-tokens",
        type=_positive,
        default=2**20,
        metavar="TOKENS",
        help="bound of the same queue in tokens of prompts",
    )
    add("--max-queued-batch-requests", type=_count, metavar="N", help="likewise for the batch lane (default: the same)")
    add(
        "--max-queued-batch-tokens",
        type=_positive,
        metavar="TOKENS",
        help="likewise for the batch lane (default: the same)",
    )


def _queue_bounds(args: argparse.Namespace) -> dict[str, QueueBound]:
    """By lane."""
    from llmservice_server.api.backlog import QueueBound

    requests, tokens = args.max_queued_requests, args.max_queued_tokens
    batch_requests, batch_tokens = args.max_queued_batch_requests, args.max_queued_batch_tokens
    return {
        "interactive": QueueBound(requests, tokens),
        "batch": QueueBound(
            requests if batch_requests is None else batch_requests, tokens if batch_tokens is None else batch_tokens
        ),
    }


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dtype", choices=_DTYPES, default="auto", help="of weights and activations; auto: the checkpoint's")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one")
    add("--max-model-len", type=_positive, metavar="TOKENS", help="prompt and answer together (default: the model's)")
    add("--max-num-seqs", type=_positive, metavar="N", help="that run at once (default: as the KV cache holds)")
    add(
        "--expected-tokens",
        type=_positive,
        default=1536,
        metavar="TOKENS",
        help="that a request really uses; the default of --max-num-seqs is worked out with it",
    )
    add("--max-num-batched-tokens", type=_positive, default=2048, metavar="TOKENS", help="token budget of one step")
    add(
        "--max-prefill-tokens",
        type=_positive,
        metavar="TOKENS",
        help="of a step, at most for all prompts together (default: 512 on CPU, where more compute no faster)",
    )
    add(
        "--prefill-chunk-tokens",
        type=_positive,
        default=512,
        metavar="TOKENS",
        help="of a step, at most for one prompt, and half of --max-prefill-tokens",
    )
    add("--block-size", type=_positive, default=16, metavar="TOKENS", help="of the KV cache's blocks")
    add("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE", help="of the memory that may be used")
    add("--memory-limit", type=_memory, metavar="BYTES", help="of the memory that utilization is a share of, at most")
    add(
        "--start-record",
        type=Path,
        metavar="FILE",
        help="on CPU: where a start notes its KV cache; one that was killed is followed by one with a smaller cache",
    )
    add("--kv-cache-memory", type=_memory, metavar="BYTES", help="such as 512MiB (default: what utilization leaves)")
    add("--kv-cache-dtype", choices=(*_DTYPES, "fp8"), default="auto", help="auto: the model's; fp8: on CUDA only")
    add(
        "--attention",
        choices=("auto", "triton", "torch"),
        default="auto",
        help="triton: our GPU kernels; torch: on any device; auto: the fastest that works, and the log says why",
    )
    add(
        "--enforce-eager",
        action="store_true",
        help="on CUDA: launch a decode step's kernels one by one, without graphs",
    )
    add("--no-overlap", action="store_true", help="on CUDA: plan no step before the one before it is read")
    add("--pooling", choices=("last", "mean"), default="last", help="of /v1/embeddings: the last token, or the mean")
    add(
        "--embedding-window",
        type=_duration,
        default=0.005,
        metavar="SECONDS",
        help="time that an input of /v1/embeddings may wait for others to share its batch",
    )
    _add_scheduling_arguments(parser)
    add("--seed", type=int, default=0, help="of requests without a seed of their own")
    add("--threads", type=_positive, metavar="N", help="on CPU (default: torch's choice)")


def _add_scheduling_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--scheduler",
        choices=("continuous", "dynamic", "static"),
        default="continuous",
        help="dynamic and static run batches of --max-num-seqs to their end: to compare, and for batch jobs",
    )
    add(
        "--max-batch-wait",
        type=_duration,
        metavar="SECONDS",
        help="how long dynamic (default: 50ms) and static (10s) wait for a full batch",
    )
    add("--no-prefix-caching", action="store_true", help="compute every prompt whole, however it begins")
    add(
        "--swap-space-gib",
        type=float,
        default=0.0,
        metavar="GIB",
        help="CPU memory for preempted sequences (default: none, they are computed again)",
    )
    add(
        "--long-prefill-tokens",
        type=_positive,
        metavar="TOKENS",
        help="of a step, at most for all prompts longer than a chunk while others wait (default: three quarters)",
    )
    add(
        "--batch-share",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="of sequences and tokens that the batch lane keeps however busy the interactive one is",
    )
    for lane in ("interactive", "batch"):
        add(
            f"--{lane}-policy",
            choices=("fcfs", "sjf"),
            default="fcfs",
            help=f"the {lane} lane serves in order of arrival, or the shortest first with ageing",
        )


def run(args: argparse.Namespace) -> int:
    import uvloop

    from llmservice_server import json_log
    from llmservice_server.api.state import ServeConfig
    from llmservice_server.engine.config import EngineConfig
    from llmservice_server.engine.errors import ConfigError
    from llmservice_server.http_process import HttpProcess, ListenConfig, ServeError

    model: Path = args.model
    if not (model / "config.json").is_file():
        raise CommandError(
            f"{model} holds no config.json: --model expects a checkpoint in Hugging Face's format", status=1
        )
    try:
        engine = EngineConfig(
            model=model,
            dtype=args.dtype,
            device=args.device,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            expected_tokens=args.expected_tokens,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_prefill_tokens=args.max_prefill_tokens,
            prefill_chunk_tokens=args.prefill_chunk_tokens,
            block_size=args.block_size,
            gpu_memory_utilization=args.gpu_memory_utilization,
            memory_limit_bytes=args.memory_limit,
            kv_cache_memory_bytes=args.kv_cache_memory,
            kv_cache_dtype=args.kv_cache_dtype,
            attention=args.attention,
            enforce_eager=args.enforce_eager,
            overlap=False if args.no_overlap else None,
            scheduler=args.scheduler,
            max_batch_wait_s=args.max_batch_wait,
            prefix_caching=not args.no_prefix_caching,
            swap_space_gib=args.swap_space_gib,
            long_prefill_tokens=args.long_prefill_tokens,
            batch_share=args.batch_share,
            interactive_policy=args.interactive_policy,
            batch_policy=args.batch_policy,
            pooling=args.pooling,
            embedding_window_s=args.embedding_window,
            seed=args.seed,
            threads=args.threads,
            start_record=args.start_record,
        )
    except ConfigError as error:
        raise CommandError(str(error)) from error
    serve = ServeConfig(
        served_model_names=tuple(args.served_model_name or [model.resolve().name]),
        queue_bounds=_queue_bounds(args),
        default_lane=args.default_lane,
        max_queued_embeddings=args.max_queued_embeddings,
        api_key_file=args.api_key_file,
        stuck_after_s=args.stuck_timeout or None,
        body_timeout_s=args.body_timeout or None,
        max_body_bytes=args.max_body_size,
        request_timeout_s=args.request_timeout or None,
        queue_timeout_s=args.queue_timeout or None,
        shape=_shape(model),
    )
    listen = ListenConfig(
        host=args.host,
        port=args.port,
        metrics_port=args.metrics_port,
        drain_timeout_s=args.drain_timeout,
        metrics_prefix=args.metrics_prefix,
        otlp_endpoint=args.otlp_endpoint,
    )
    json_log.configure(args.log_level)

    async def serve_until_stopped() -> None:
        await HttpProcess(engine, serve, listen, args.log_level).run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_until_stopped())
    except ServeError as error:
        raise CommandError(str(error), status=error.status) from error
    return 0


def _shape(model: Path) -> dict[str, Any] | None:
    """What an operator would size by; the engine says itself what it cannot run."""
    try:
        return ModelShape.from_folder(model).to_fields()
    except ShapeError:
        return None


def _memory(text: str) -> int:
    """Bytes: 536870912, 512MiB, 0.5Gi, 2GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if match is None or (num_bytes := int(float(match[1]) * _UNITS[match[2] or ""])) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory, expected bytes or something like 512MiB")
    return num_bytes


def _positive(text: str) -> int:
    return _integer(text, 1)


def _count(text: str) -> int:
    return _integer(text, 0)


def _port(text: str) -> int:
    if (port := _integer(text, 0)) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port, expected 0 to 65535")
    return port


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {least} or more")
    return int(text)


def _duration(text: str) -> float:
    """Seconds, also as 90s or 2m."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration, expected seconds, or something like 90s or 2m")
    return float(match[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[match[2] or "s"]


def _prefix(text: str) -> str:
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} cannot begin a metric's name: letters, digits, _ and : only")
    return text


COMMAND = Command(
    help="serve a model over an OpenAI-compatible HTTP API",
    add_arguments=add_arguments,
    run=run,
    extra="server",
    requires=("fastapi", "torch", "tokenizers", "uvicorn", "zmq"),
)
