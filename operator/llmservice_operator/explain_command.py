"""`llmservice explain NAME`: the state of a service, what is wrong and what to do. Also `kubectl llm explain`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from llmservice_planner.command import Command, CommandError

if TYPE_CHECKING:
    from llmservice_operator.explain.explanation import Explanation, World
    from llmservice_operator.explain.timeline import Timeline

HEALTHY, WRONG, NOT_FOUND = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the LLMService")
    parser.add_argument("-n", "--namespace", help="its namespace; default: the context's own, else default")
    parser.add_argument("--context", help="the kubeconfig's context to use; default: the current one")
    parser.add_argument(
        "--prometheus",
        metavar="URL",
        help="chart the last hour from a Prometheus that scrapes operator and pods (default: by the status)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the charts to a .svg, .png or .html file")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="for people or for machines")


def run(args: argparse.Namespace) -> int:
    """0 where all is well, 1 where something is wrong, 2 where there is no such service."""
    from llmservice_planner.charts import ChartError

    try:
        return _explain(args)
    except ChartError as error:
        raise CommandError(str(error)) from error


def _explain(args: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from llmservice_operator.explain.explanation import explain
    from llmservice_operator.explain.plot import check, text_plot, write_plot
    from llmservice_operator.explain.text import render

    if args.plot is not None:
        check(args.plot)
    namespace = args.namespace or _context_namespace(args.context)
    world = asyncio.run(_read(namespace, args.name, args.context))
    if world is None:
        raise CommandError(
            f"there is no LLMService {args.name} in namespace {namespace}: kubectl get llms -A lists all", NOT_FOUND
        )
    try:
        explanation = explain(world)
    except ValidationError as error:
        raise CommandError(
            f"the spec of {args.name} does not fit this version's CRD, correct it: {error}", WRONG
        ) from error
    timeline = _timeline(args.prometheus, explanation)
    if args.plot is not None:
        title = f"{explanation.name} in {explanation.namespace}"
        write_plot(timeline, title, render(explanation, time.time(), colour=False), args.plot)
    if args.output == "json":
        print(json.dumps(explanation.document(), indent=2))
    else:
        sys.stdout.write(render(explanation, time.time(), colour=_colour()))
        if lines := list(text_plot(timeline)):
            print("\n" + "\n".join(lines))
    return HEALTHY if explanation.healthy else WRONG


def _timeline(prometheus: str | None, explanation: Explanation) -> Timeline:
    """Of a service that the operator scales; of any with a Prometheus."""
    from llmservice_operator.explain.timeline import Timeline, TimelineError, of_prometheus, of_status

    known, now = explanation.autoscaling, time.time()
    if prometheus is not None:
        read = of_prometheus(prometheus, explanation.namespace, explanation.name, explanation.ttft_target_s, now)
        try:
            return asyncio.run(read)
        except TimelineError as error:
            raise CommandError(f"--prometheus {error}") from error
    if known is None or not known.decisions:
        return Timeline("", (), (), ())
    return of_status(known, explanation.ttft_target_s, now)


def _colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


async def _read(namespace: str, name: str, context: str | None) -> World | None:
    from kubernetes.aio.config import ConfigException

    from llmservice_operator.cluster.kube_client import KubeClient, KubeError
    from llmservice_operator.explain.explanation import read_world

    try:
        client = await KubeClient.connect(context)
    except ConfigException as error:
        raise CommandError(f"no way to the API server: {error}. Set KUBECONFIG, or give --context") from error
    try:
        return await read_world(client, namespace, name)
    except KubeError as error:
        raise CommandError(f"can't read LLMService {namespace}/{name}: {error}") from error
    finally:
        await client.close()


def _context_namespace(context: str | None) -> str:
    """The namespace that the kubeconfig's context names; `default` where it names none, or where there is no file."""
    from kubernetes.aio.config import ConfigException, list_kube_config_contexts

    from llmservice_operator.cluster.kube_client import KUBECONFIG_ERRORS

    try:
        contexts, active = list_kube_config_contexts(  # type: ignore[no-untyped-call]
            os.environ.get("KUBECONFIG")
        )
    except (ConfigException, *KUBECONFIG_ERRORS):  # which connecting reports
        return "default"
    chosen = next((one for one in contexts if one["name"] == context), None) if context else active
    return str(((chosen or {}).get("context") or {}).get("namespace") or "default")


COMMAND = Command(
    help="say why a service is as it is, what is wrong and what to do",
    add_arguments=add_arguments,
    run=run,
    extra="operator",
    requires=("kubernetes", "aiohttp", "pydantic"),
)
