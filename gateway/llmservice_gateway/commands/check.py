"""`llmservice check URL`: does a gateway (or a server) answer, and which models does it serve? `helm test` runs it."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import time
import urllib.parse

from llmservice_planner.command import Command, CommandError

_RETRY_S = 1.0
_REQUEST_TIMEOUT_S = 5.0
_USER = re.compile(r"(?<=//)[^/?#]*@")  # a name and a password, which no message repeats


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", metavar="URL", help="where it listens, such as http://llmservice-gateway.NAMESPACE.svc")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="how long it may take until it answers")
    add("--insecure", action="store_true", help="take any TLS certificate: the gateway's need not be for this name")


def _run(args: argparse.Namespace) -> int:
    if not 0 <= args.timeout < math.inf:
        raise CommandError(f"--timeout is {args.timeout:g}, expected seconds, 0 or more")
    if not _is_url(args.url):
        raise CommandError(f"{args.url.rpartition('@')[2]!r} is no URL: expected http://HOST[:PORT]")
    shown = _USER.sub("", args.url)
    models = asyncio.run(_models(args.url.rstrip("/"), shown, args.timeout, verifies=not args.insecure))
    if models is None:
        print(f"{shown} answers, and wants an API key")
        return 0
    served = f"serves {', '.join(models)}" if models else "answers, and serves no model yet: apply an LLMService"
    print(f"{shown} {served}")
    return 0


def _is_url(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        parts.port  # noqa: B018  # raises ValueError
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname)


async def _models(url: str, shown: str, timeout_s: float, *, verifies: bool) -> list[str] | None:
    """The names that clients may put in `model`; None where a key is needed to see them.

    Raises CommandError where there is no answer in time.
    """
    import aiohttp

    deadline = time.monotonic() + timeout_s
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            try:
                async with session.get(f"{url}/v1/models", ssl=verifies) as response:
                    if response.status == 200:
                        return [str(model["id"]) for model in json.loads(await response.read())["data"]]
                    if response.status == 401:
                        return None
                    why = f"GET /v1/models is answered with {response.status}"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = str(error) or type(error).__name__
            except (ValueError, KeyError, TypeError):
                why = "GET /v1/models is answered with something that is no list of models"
            if time.monotonic() + _RETRY_S > deadline:
                raise CommandError(f"{shown} gave no list of models within {timeout_s:g} s: {why}", status=1)
            await asyncio.sleep(_RETRY_S)


COMMAND = Command(
    help="ask a gateway which models it serves, and fail where it does not answer",
    add_arguments=_add_arguments,
    run=_run,
    extra="gateway",
    requires=("aiohttp",),
)
