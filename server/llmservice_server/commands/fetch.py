"""`llmservice fetch URI DIR`: runs in a pod's init container before the server starts, and for adapters beside it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from llmservice_planner.addresses import ANY_ADDRESS, endpoint
from llmservice_planner.command import Command, CommandError, port

if TYPE_CHECKING:
    from llmservice_server.fetch.download import FetchOptions
    from llmservice_server.fetch.progress import Progress

_TERMINATED = 128 + signal.SIGTERM


class _Terminated(BaseException):
    """SIGTERM. Not an Exception, so that no code handles it as an error."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "uri",
        metavar="URI",
        help="hf://org/name[@revision] (token: $HF_TOKEN, mirror: $HF_ENDPOINT), s3://bucket/path (AWS's default"
        " credentials, $AWS_ENDPOINT_URL for other stores) or file:///path",
    )
    add("directory", type=Path, metavar="DIR", help="where to put the checkpoint; created when missing")
    add("--parallel", type=_parallel, default=4, metavar="N", help="files that are downloaded at once, 1 to 32")
    add("--adapter", action="store_true", help="fetch a LoRA adapter in PEFT's format")
    add("--shared", action="store_true", help="DIR is shared: one process downloads, the others wait")
    add(
        "--compile-cache",
        type=Path,
        metavar="DIR",
        help="create this folder beside it, where `llmservice serve --compile-cache` may write",
    )
    add(
        "--lease",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="after so long without a heartbeat another process takes the lock of a shared DIR",
    )
    add(
        "--progress-port",
        type=port,
        metavar="PORT",
        help="serve GET /progress there while fetching, on $LLMSERVICE_HOST (default: all addresses)",
    )


def run(args: argparse.Namespace) -> int:
    from llmservice_server.fetch.download import FetchOptions
    from llmservice_server.fetch.progress import Progress
    from llmservice_server.fetch.source import FetchError

    if not 1 <= args.lease <= 3600:
        raise CommandError(f"--lease is {args.lease}, expected 1 to 3600 seconds")
    if args.compile_cache is not None:
        _make_folder(args.compile_cache)
    options = FetchOptions(parallel=args.parallel, shared=args.shared, adapter=args.adapter, lease_s=args.lease)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        names = _fetch(args, options, Progress())
    except FetchError as error:
        raise CommandError(str(error), status=1) from error
    except _Terminated:  # the lock is released; do not wait for threads that wait for the network
        sys.stdout.flush()
        os._exit(_TERMINATED)
    print(f"{args.directory}: {', '.join(names)}")
    return 0


def _fetch(args: argparse.Namespace, options: FetchOptions, progress: Progress) -> list[str]:
    from llmservice_server.fetch.checkpoint import fetch
    from llmservice_server.fetch.progress import log_progress, serve_progress

    with ExitStack() as stack:
        if args.progress_port is not None:
            host = os.environ.get("LLMSERVICE_HOST", ANY_ADDRESS)
            try:
                stack.enter_context(serve_progress(progress, host, args.progress_port))
            except OSError as error:  # the download is possible without it
                _log(f"no /progress on {endpoint(host, args.progress_port)}: {error}")
        stack.enter_context(log_progress(progress, _log))
        return fetch(args.uri, args.directory, options, progress)


def _make_folder(folder: Path) -> None:
    """By this process's user: the kubelet, which would make it for the mount, may have no rights on the volume."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # the server then compiles each kernel
        _log(f"{folder} cannot be made: {error.strerror}")


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _log(line: str) -> None:
    print(line, flush=True)


def _parallel(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 32:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parallel downloads, expected 1 to 32")
    return int(text)


COMMAND = Command(
    help="download or copy a checkpoint or an adapter (safetensors only)",
    add_arguments=add_arguments,
    run=run,
    extra="fetch",
    requires=("botocore", "httpx2", "huggingface_hub", "tenacity"),
)
