"""`llmservice up`: a cluster on this machine until the command ends."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llmservice_planner.command import Command, CommandError, count, port

if TYPE_CHECKING:
    from llmservice_local.cluster import ClusterSettings, LocalCluster
    from llmservice_local.manifests import Release


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f",
        "--filename",
        action="append",
        type=Path,
        default=[],
        metavar="MANIFEST",
        help="manifest to apply; repeatable",
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="nodes, each with the capacity below (default: 1)"
    )
    parser.add_argument("--gpus", type=count, default=0, metavar="N", help="nvidia.com/gpu capacity of a node")
    parser.add_argument(
        "--gpu-product", default="l4", metavar="NAME", help="the GPU, for the node's label (default: l4)"
    )
    parser.add_argument("--cpu", default="", metavar="QUANTITY", help="CPU of the node (default: the machine's)")
    parser.add_argument("--memory", default="", metavar="QUANTITY", help="memory of the node (default: the machine's)")
    parser.add_argument(
        "--node-label", action="append", default=[], metavar="KEY=VALUE", help="label of the node; repeatable"
    )
    parser.add_argument("--models-root", type=Path, metavar="DIR", help="folder of file:/// models: file:///x is DIR/x")
    parser.add_argument("--api-port", type=port, default=0, metavar="PORT", help="0 selects a free one")
    parser.add_argument("--gateway-port", type=port, default=0, metavar="PORT", help="0 selects a free one")
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="kubeconfig and logs (default: a temporary folder)"
    )
    parser.add_argument("--no-operator", action="store_true", help="do not start an operator")
    parser.add_argument("--no-gateway", action="store_true", help="do not start a gateway")
    parser.add_argument("--prometheus", action="store_true", help="start a Prometheus; the operator reads from it")
    parser.add_argument(
        "--operator-arg",
        action="append",
        default=[],
        metavar="ARGUMENT",
        help="passed to `llmservice operator`, as in --operator-arg=--tick=1; repeatable",
    )
    parser.add_argument(
        "--release",
        type=Path,
        metavar="FILE",
        help="output of `helm template`: operator and gateway use its accounts, roles and arguments",
    )
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=["debug", "info", "warning", "error"],
        help="of this process, on standard error; the components' logs are files",
    )


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("celpy").setLevel(logging.WARNING)  # at debug it writes each object that a rule of the CRD checks
    labels = dict(_label(text) for text in args.node_label)
    with _state_folder(args.state_dir) as folder:
        return asyncio.run(_up(_settings(args, folder.resolve(), labels), args.filename))


@contextmanager
def _state_folder(wanted: Path | None) -> Iterator[Path]:
    """The folder of the cluster's state, locked until the block ends, or a temporary one."""
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="llmservice-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        lock = (wanted / "lock").open("a", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--state-dir {wanted}: {error}: name a folder that can be written") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"--state-dir {wanted} is in use by another llmservice up: end that one, or name another folder"
            raise CommandError(message) from error
        yield wanted


def _settings(args: argparse.Namespace, state_dir: Path, labels: dict[str, str]) -> ClusterSettings:
    from llmservice_local.cluster import ClusterSettings
    from llmservice_operator.api.units import amount
    from llmservice_planner.sizing.gpu import UnknownGPU, find_gpu

    for name in ("cpu", "memory"):
        if value := getattr(args, name):
            try:
                amount(value)
            except ValueError as error:
                raise CommandError(f"--{name}: {error}") from error
    if not 1 <= args.nodes <= 16:
        raise CommandError(f"--nodes is {args.nodes}, expected 1 to 16")
    try:
        find_gpu(args.gpu_product)
    except UnknownGPU as error:
        raise CommandError(f"--gpu-product: {error}") from error
    if args.models_root is not None and not args.models_root.is_dir():
        raise CommandError(f"--models-root {args.models_root} does not exist")
    for path in args.filename:
        if not path.is_file():
            raise CommandError(f"-f {path} does not exist")
    return ClusterSettings(
        state_dir=state_dir,
        api_port=args.api_port,
        gateway_port=args.gateway_port,
        nodes=args.nodes,
        gpus=args.gpus,
        gpu_product=args.gpu_product,
        cpu=args.cpu,
        memory=args.memory,
        node_labels=labels,
        models_root=args.models_root.resolve() if args.models_root else None,
        operator=not args.no_operator,
        gateway=not args.no_gateway,
        prometheus=args.prometheus,
        operator_arguments=tuple(args.operator_arg),
        release=_release(args.release),
    )


def _release(path: Path | None) -> Release | None:
    from llmservice_local.errors import ApiError
    from llmservice_local.manifests import read_release

    if path is None:
        return None
    if not path.is_file():
        raise CommandError(f"--release {path} does not exist")
    try:
        return read_release(path)
    except ApiError as error:
        raise CommandError(f"--release: {error}") from error


async def _up(settings: ClusterSettings, manifests: list[Path]) -> int:
    running = asyncio.create_task(_run_cluster(settings, manifests))

    def interrupt() -> None:
        if not running.cancelling():  # a second Ctrl-C does not interrupt the end
            running.cancel()
            print("stopping every process of the cluster", flush=True)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    with suppress(asyncio.CancelledError):
        await running
    return 0


async def _run_cluster(settings: ClusterSettings, manifests: list[Path]) -> None:
    """Run the cluster until this is cancelled; raises `CommandError`, or what ended a controller or a node."""
    from llmservice_local.cluster import LocalCluster
    from llmservice_local.component import ComponentError
    from llmservice_local.errors import ApiError

    try:
        async with LocalCluster(settings) as cluster:
            for path in manifests:
                await _apply(cluster, path)
            _announce(cluster)
            await cluster.failed()
    except (ComponentError, ApiError, OSError) as error:
        raise CommandError(str(error), status=1) from error


async def _apply(cluster: LocalCluster, path: Path) -> None:
    from llmservice_local.manifests import apply_manifest

    for applied in await apply_manifest(cluster.endpoint, path):
        print(f"{applied} applied", flush=True)


def _announce(cluster: LocalCluster) -> None:
    kind = "emulated" if cluster.settings.assets is None else "kube-apiserver"
    print(f"API server  {cluster.api_url}  ({kind})")
    if cluster.gateway_url:
        print(f"gateway     {cluster.gateway_url}/v1")
    if cluster.prometheus_url:
        print(f"prometheus  {cluster.prometheus_url}")
    print(f"logs        {cluster.settings.state_dir / 'components'}")
    print(f"\nexport KUBECONFIG={cluster.kubeconfig}\n\nCtrl-C ends it (pid {os.getpid()})", flush=True)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise CommandError(f"--node-label {text!r}: expected KEY=VALUE")
    return key, value


COMMAND = Command(
    help="run a Kubernetes cluster, the operator and the gateway on this machine, without Docker or root",
    add_arguments=add_arguments,
    run=run,
    extra="local",
    requires=("aiohttp", "celpy", "kubernetes"),
)
