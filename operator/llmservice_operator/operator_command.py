"""`llmservice operator`: watch LLMServices and reconcile their children."""

from __future__ import annotations

import argparse
import asyncio
import logging

from llmservice_operator.settings import OperatorSettings
from llmservice_planner.command import Command, CommandError
from llmservice_planner.key_file import KeyFileError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    OperatorSettings.add_arguments(parser)
    parser.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"], help="what to log"
    )


def run(args: argparse.Namespace) -> int:
    try:
        settings = OperatorSettings.of(args)
        settings.peers()
        settings.usable_secrets()
    except ValueError as error:
        raise CommandError(str(error)) from error
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    return asyncio.run(_run(settings))


async def _run(settings: OperatorSettings) -> int:
    from kubernetes.aio.config import ConfigException

    from llmservice_operator.cluster.leadership import LeadershipLostError
    from llmservice_operator.framework.operator import OperatorEndedError, run_operator

    try:
        await run_operator(settings)
    except ConfigException as error:
        raise CommandError(f"no way to the API server: {error}. Set KUBECONFIG, or run inside a cluster") from error
    except KeyFileError as error:
        raise CommandError(f"--gateway-public-keys: {error}") from error
    except LeadershipLostError as error:
        raise CommandError(f"no longer the leader: {error}", status=1) from error
    except (OperatorEndedError, OSError) as error:
        raise CommandError(f"the operator ended, start it again: {error}", status=1) from error
    return 0


COMMAND = Command(
    help="run the control loop: a Deployment, a Service and a scale for every LLMService",
    add_arguments=add_arguments,
    run=run,
    extra="operator",
    requires=("kopf", "kubernetes", "aiohttp", "pydantic"),
)
