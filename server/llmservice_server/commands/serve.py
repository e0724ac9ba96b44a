"""`llmservice serve`: the inference server of one pod."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from llmservice_planner.addresses import ANY_ADDRESS
from llmservice_planner.command import Command, CommandError, count, json_object, port, whole_number
from llmservice_planner.key_file import KeyFileError
from llmservice_planner.model.config import read_modules
from llmservice_planner.model.encoders import without_config
from llmservice_planner.model.shape import ModelShape, ShapeError
from llmservice_server.engine.config import EngineConfig, Flag, LaneName, ReasoningFormatName, ToolCallFormatName
from llmservice_server.types.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from llmservice_server.engine.admission_queue import QueueBound
    from llmservice_server.http.state import ServeConfig

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_METAVARS = {
    **dict.fromkeys(("tokens", "len", "size"), "TOKENS"),
    **dict.fromkeys(("share", "utilization"), "SHARE"),
    "bytes": "BYTES",
    "s": "SECONDS",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_listen_arguments(parser)
    _add_protocol_arguments(parser)
    _add_queue_arguments(parser)
    _add_limit_arguments(parser)
    _add_observability_arguments(parser)
    _add_adapter_arguments(parser)
    _add_engine_arguments(parser)


def _add_listen_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="folder of a checkpoint in Hugging Face's format")
    add(
        "--config-overrides",
        type=json_object,
        metavar="JSON",
        help='of its config.json, as a JSON merge patch: {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, …}}',
    )
    add(
        "--served-model-name",
        action="extend",
        nargs="+",
        metavar="NAME",
        help="what clients put in `model`; several are aliases (default: the folder's name)",
    )
    add(
        "--host",
        default=os.environ.get("LLMSERVICE_HOST", ANY_ADDRESS),
        help="address to listen on, $LLMSERVICE_HOST (default: all, IPv4 and IPv6)",
    )
    add("--port", type=port, default=8000, help="port to listen on; 0 takes a free one and logs it")
    add(
        "--metrics-port",
        type=port,
        default=8001,
        metavar="PORT",
        help="port of /metrics; the same as --port serves both there, 0 takes a free one and logs it",
    )
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="one KEY, KEY:LANE or KEY:LANE:NAME a line, the lane being the highest it may choose (default: no keys)",
    )
    add(
        "--gateway-keys",
        type=Path,
        metavar="FILE",
        help="one or two Ed25519 public keys in PEM: only requests with a token that a gateway signed are served",
    )
    add("--audience", metavar="NAMESPACE/NAME", help="the LLMService that such a token must be for")


def _add_protocol_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--chat-template", type=Path, metavar="FILE", help="Jinja template of chats (default: the tokenizer's)")
    add(
        "--tool-call-format",
        choices=get_args(ToolCallFormatName),
        default="auto",
        help="in which the model calls tools; auto: as its chat template shows; none: requests with tools are refused",
    )
    add(
        "--reasoning-format",
        choices=get_args(ReasoningFormatName),
        default="auto",
        help="of what becomes reasoning_content; auto: as chat template and tokenizer show; none: it stays content",
    )
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
        choices=get_args(LaneName),
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
        type=whole_number,
        default=2**20,
        metavar="TOKENS",
        help="bound of the same queue in tokens of prompts",
    )
    add("--max-queued-batch-requests", type=count, metavar="N", help="likewise for the batch lane (default: the same)")
    add(
        "--max-queued-batch-tokens",
        type=whole_number,
        metavar="TOKENS",
        help="likewise for the batch lane (default: the same)",
    )
    add("--max-queued-embeddings", type=count, default=4096, help="inputs of /v1/embeddings that may wait, likewise")


def _add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--enable-lora-updates",
        action="store_true",
        help="clients may load and unload LoRA adapters from any folder that the server can read",
    )
    parser.add_argument(
        "--adapters-file",
        type=Path,
        metavar="FILE",
        help='a JSON list of the LoRA adapters to serve, [{"name": "poet", "uri": "hf://org/poet", "pinned": false}];'
        " compared every 5 seconds",
    )
    parser.add_argument(
        "--adapters-dir", type=Path, metavar="DIR", help="where the adapters of --adapters-file are fetched to"
    )


def _add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
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
        "--stuck-timeout",
        type=_duration,
        default=300.0,
        metavar="SECONDS",
        help="an engine that has work and finishes no step for so long is killed, and the server ends; 0 for never",
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
        help="larger requests get 413 (default: 1 MiB and 64 bytes for each token of --max-model-len; for embeddings "
        "and scores at least 16 MiB)",
    )


def _add_observability_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--otlp-endpoint",
        metavar="URL",
        help="collector to send traces to, such as http://otel:4318 (default: $OTEL_EXPORTER_OTLP_ENDPOINT, if any)",
    )
    add("--metrics-prefix", type=_prefix, default="llmservice_", help='of the names in /metrics; "vllm:" for vLLM\'s')
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="JSON lines on standard output",
    )


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting of `EngineConfig` that names one, named as the setting without its unit.

    A setting that is on by default, or left open, gets a flag that turns it off.
    """
    defaults = {each.name: each.default for each in fields(EngineConfig)}
    for name, kind, flag in _settings():
        option, default = re.sub(r"_(bytes|s)$", "", name).replace("_", "-"), defaults[name]
        add = functools.partial(parser.add_argument, dest=name, default=default, help=flag.help)
        if kind is bool:
            turns_off = default is not False
            add(f"--no-{option}" if turns_off else f"--{option}", action="store_const", const=not turns_off)
        elif get_origin(kind) is Literal:
            add(f"--{option}", choices=get_args(kind))
        else:
            unit = name.rpartition("_")[2]
            add(f"--{option}", type=flag.parse or _parser(unit, kind), metavar=flag.metavar or _METAVARS.get(unit, "N"))


def _settings() -> Iterator[tuple[str, Any, Flag]]:
    """Name, type (of `type | None` the type) and flag."""
    for name, hint in get_type_hints(EngineConfig, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, flag = get_args(hint)
            yield name, get_args(kind)[0] if get_origin(kind) in (Union, UnionType) else kind, flag


def _parser(unit: str, kind: Any) -> Any:
    return {"bytes": _memory, "s": _duration}.get(unit) or (whole_number if kind is int else kind)


def _memory(text: str) -> int:
    """Bytes: 536870912, 512MiB, 0.5Gi, 2GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if match is None or (num_bytes := int(float(match[1]) * _UNITS[match[2] or ""])) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory, expected bytes or something like 512MiB")
    return num_bytes


def _duration(text: str) -> float:
    """Seconds, also as 90s or 2m."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration, expected seconds, or something like 90s or 2m")
    return float(match[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[match[2] or "s"]


def _prefix(text: str) -> str:
    """The prefix of metric names."""
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} cannot begin a metric's name: letters, digits, _ and : only")
    return text


def _queue_bounds(args: argparse.Namespace) -> dict[str, QueueBound]:
    """The bound of each lane's queue."""
    from llmservice_server.engine.admission_queue import QueueBound

    requests, tokens = args.max_queued_requests, args.max_queued_tokens
    batch_requests, batch_tokens = args.max_queued_batch_requests, args.max_queued_batch_tokens
    return {
        "interactive": QueueBound(requests, tokens),
        "batch": QueueBound(
            requests if batch_requests is None else batch_requests, tokens if batch_tokens is None else batch_tokens
        ),
    }


def _refuse_contradictions(args: argparse.Namespace, engine: EngineConfig) -> None:
    """Raises CommandError."""
    if args.enable_lora_updates and not engine.max_loras:
        raise CommandError("--enable-lora-updates needs slots for adapters: set --max-loras")
    if args.adapters_file is not None and not (engine.max_loras and args.adapters_dir):
        raise CommandError("--adapters-file needs slots and room for adapters: set --max-loras and --adapters-dir")
    if (args.gateway_keys is None) != (args.audience is None):
        raise CommandError("--gateway-keys and --audience need each other: set both or neither")
    if args.gateway_keys is not None and args.api_key_file is not None:
        raise CommandError(
            "--api-key-file cannot be combined with --gateway-keys, which let in the gateway alone: make keys for the "
            "gateway instead, or set spec.access: direct"
        )


def _serve_config(args: argparse.Namespace, engine: EngineConfig) -> ServeConfig:
    from llmservice_server.http.state import ServeConfig
    from llmservice_server.text.chat_formats import FormatNames

    return ServeConfig(
        served_model_names=tuple(args.served_model_name or [args.model.resolve().name]),
        queue_bounds=_queue_bounds(args),
        default_lane=args.default_lane,
        max_queued_embeddings=args.max_queued_embeddings,
        api_key_file=args.api_key_file,
        gateway_keys=args.gateway_keys,
        audience=args.audience or "",
        stuck_after_s=args.stuck_timeout or None,
        body_timeout_s=args.body_timeout or None,
        max_body_bytes=args.max_body_size,
        request_timeout_s=args.request_timeout or None,
        queue_timeout_s=args.queue_timeout or None,
        expected_tokens=engine.expected_tokens,
        shape=_shape(engine.model),
        generation_config=args.generation_config,
        chat_template=args.chat_template,
        formats=FormatNames(args.tool_call_format, args.reasoning_format),
        cors_allow_origins=tuple(args.cors_allow_origin),
        max_loras=engine.max_loras,
        enable_lora_updates=args.enable_lora_updates,
        adapters_file=args.adapters_file,
        adapters_dir=args.adapters_dir,
        strict_parameters=args.strict_parameters,
    )


def serve(args: argparse.Namespace, engine_command: Sequence[str] | None = None) -> int:
    """`engine_command` starts another engine process than the server's own, which benchmarks measure it with."""
    import uvloop

    from llmservice_httpserver.listening import ListenError
    from llmservice_server.http.server import HttpProcess, ListenConfig, ServeError
    from llmservice_server.http.tracing import TracingError
    from llmservice_server.ipc import json_log
    from llmservice_server.ipc.client import ENGINE_COMMAND
    from llmservice_server.text.model_folder import served_folder

    model: Path = args.model
    if not (model / "config.json").is_file():
        raise CommandError(without_config(str(model), read_modules(model)), status=1)
    try:
        model = served_folder(model, args.config_overrides)
    except ModelLoadError as error:
        raise CommandError(str(error), status=1) from error
    try:
        engine = EngineConfig(model=model, **{name: getattr(args, name) for name, _, _ in _settings()})
    except ConfigError as error:
        raise CommandError(str(error)) from error
    _refuse_contradictions(args, engine)
    config = _serve_config(args, engine)
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
        await HttpProcess(engine, config, listen, args.log_level, engine_command or ENGINE_COMMAND).run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_until_stopped())
    except (KeyFileError, ListenError, TracingError) as error:
        raise CommandError(str(error), status=1) from error
    except ServeError as error:
        raise CommandError(str(error), status=error.status) from error
    return 0


def _shape(model: Path) -> dict[str, Any] | None:
    """The figures that an operator sizes a service by; None where the engine will report what is wrong."""
    try:
        return ModelShape.from_folder(model).to_fields()
    except ShapeError:
        return None


COMMAND = Command(
    help="serve a model over an OpenAI-compatible HTTP API",
    add_arguments=add_arguments,
    run=serve,
    extra="server",
    requires=("fastapi", "torch", "tokenizers", "uvicorn", "zmq"),
)
