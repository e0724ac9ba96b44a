"""`llmservice serve`: the inference server of one pod."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmservice_planner.command import Command, CommandError
from llmservice_planner.shape import ModelShape, ShapeError
from llmservice_server.commands.flags import (
    add_engine_arguments,
    count,
    duration,
    engine_settings,
    memory,
    port,
    positive,
    prefix,
)

if TYPE_CHECKING:
    from llmservice_server.http.admission_queue import QueueBound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_http_arguments(parser)
    add_engine_arguments(parser)


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
    add("--port", type=port, default=8000, help="port to listen on; 0 takes a free one and logs it")
    add(
        "--metrics-port",
        type=port,
        default=8001,
        metavar="PORT",
        help="port of /metrics; the same as --port serves both there, 0 takes a free one and logs it",
    )
    _add_protocol_arguments(parser)
    _add_queue_arguments(parser)
    add("--max-queued-embeddings", type=count, default=4096, help="inputs of /v1/embeddings that may wait, likewise")
    add("--request-timeout", type=duration, default=600.0, metavar="SECONDS", help="deadline of a request; 0 for none")
    add(
        "--queue-timeout",
        type=duration,
        default=0.0,
        metavar="SECONDS",
        help="of it, at most before the request is first computed; 0 for all of it",
    )
    add(
        "--drain-timeout",
        type=duration,
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
        type=duration,
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
        type=duration,
        default=60.0,
        metavar="SECONDS",
        help="for a request's body to be complete, else 408; 0 for none",
    )
    add(
        "--max-body-size",
        type=memory,
        metavar="BYTES",
        help="larger requests get 413 (default: 1 MiB and 64 bytes for each token of --max-model-len)",
    )
    add("--metrics-prefix", type=prefix, default="llmservice_", help='of the names in /metrics; "vllm:" for vLLM\'s')
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="JSON lines on standard output",
    )


def _add_protocol_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--chat-template", type=Path, metavar="FILE", help="Jinja template of chats (default: the tokenizer's)")
    add(
        "--generation-config",
        choices=("auto", "vllm"),
        default="auto",
        help="auto: the model's generation_config.json sets temperature, top_p, top_k, min_p and repetition_penalty "
        "where requests do not; vllm: it does not",
    )
    add(
        "--strict-parameters",
        action="store_true",
        help="refuse parameters that the server does not know (default: ignore them and name them in a header)",
    )
    add(
        "--cors-allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page's origin that browsers may call the API from, * for all; may be repeated (default: none)",
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
        type=count,
        default=512,
        metavar="N",
        help="bound of the interactive lane's queue, in sequences; from 80%% of it on more are refused with 429",
    )
    add(
        "--max-queued-tokens",
        type=positive,
        default=2**20,
        metavar="TOKENS",
        help="bound of the same queue in tokens of prompts",
    )
    add("--max-queued-batch-requests", type=count, metavar="N", help="likewise for the batch lane (default: the same)")
    add(
        "--max-queued-batch-tokens",
        type=positive,
        metavar="TOKENS",
        help="likewise for the batch lane (default: the same)",
    )


def _queue_bounds(args: argparse.Namespace) -> dict[str, QueueBound]:
    """By lane."""
    from llmservice_server.http.admission_queue import QueueBound

    requests, tokens = args.max_queued_requests, args.max_queued_tokens
    batch_requests, batch_tokens = args.max_queued_batch_requests, args.max_queued_batch_tokens
    return {
        "interactive": QueueBound(requests, tokens),
        "batch": QueueBound(
            requests if batch_requests is None else batch_requests, tokens if batch_tokens is None else batch_tokens
        ),
    }


def run(args: argparse.Namespace) -> int:
    import uvloop

    from llmservice_server.engine.config import EngineConfig
    from llmservice_server.http.server import HttpProcess, ListenConfig, ServeError
    from llmservice_server.http.state import ServeConfig
    from llmservice_server.ipc import json_log
    from llmservice_server.types.errors import ConfigError

    model: Path = args.model
    if not (model / "config.json").is_file():
        raise CommandError(
            f"{model} holds no config.json: --model expects a checkpoint in Hugging Face's format", status=1
        )
    try:
        engine = EngineConfig(model=model, **engine_settings(args))
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
        generation_config=args.generation_config,
        chat_template=args.chat_template,
        cors_allow_origins=tuple(args.cors_allow_origin),
        strict_parameters=args.strict_parameters,
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


COMMAND = Command(
    help="serve a model over an OpenAI-compatible HTTP API",
    add_arguments=add_arguments,
    run=run,
    extra="server",
    requires=("fastapi", "torch", "tokenizers", "uvicorn", "zmq"),
)
