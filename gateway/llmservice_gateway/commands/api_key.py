"""`llmservice api-key NAME`: a new key for a client of the gateway, and the Secret that lets it in."""

from __future__ import annotations

import argparse
import re
import sys

from llmservice_planner.command import Command, CommandError

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", help="of the key and of its Secret; logs and metrics have it")
    add("-n", "--namespace", metavar="NAMESPACE", help="the gateway's (default: the one that kubectl applies to)")
    add(
        "--model",
        action="append",
        metavar="PATTERN",
        help="a served name, namespace/name, or a pattern such as llama-* that it may use; repeatable (default: all)",
    )
    add(
        "--model-namespace",
        action="append",
        metavar="PATTERN",
        help="a namespace whose models it may use; repeatable (default: all)",
    )
    add("--lane", choices=("interactive", "batch"), help="default and highest lane (default: the service's)")
    add("--requests-per-minute", type=int, metavar="N", help="limit (default: none), likewise the next ones")
    add("--tokens-per-minute", type=int, metavar="N", help="of prompts and answers")
    add("--concurrent-requests", type=int, metavar="N", help="at any moment")
    add("--monthly-tokens", type=int, metavar="N", help="budget of a calendar month (UTC); the gateway needs Redis")


def _run(args: argparse.Namespace) -> int:
    import yaml
    from pydantic import ValidationError

    from llmservice_gateway.access.keys import Policy, key_secret, new_key

    if not _NAME.fullmatch(args.name):
        raise CommandError(
            f"{args.name!r} cannot name a Secret: expected lower-case letters, digits, - and ., such as team-a-chat"
        )
    given = {
        "models": args.model,
        "namespaces": args.model_namespace,
        "lane": args.lane,
        "requests_per_minute": args.requests_per_minute,
        "tokens_per_minute": args.tokens_per_minute,
        "concurrent_requests": args.concurrent_requests,
        "monthly_tokens": args.monthly_tokens,
    }
    try:
        policy = Policy.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        flag = {"models": "model", "namespaces": "model-namespace"}.get(str(first["loc"][0]), str(first["loc"][0]))
        raise CommandError(f"--{flag.replace('_', '-')} is {first['input']!r}: {first['msg']}") from error
    key = new_key()
    yaml.safe_dump(key_secret(args.name, key, policy, args.namespace), sys.stdout, sort_keys=False)
    print(f"The key, which is shown only now: {key}", file=sys.stderr)
    return 0


COMMAND = Command(
    help="make an API key for the gateway: its Secret on standard output, the key itself on standard error",
    add_arguments=_add_arguments,
    run=_run,
    extra="gateway",
    requires=("kubernetes", "pydantic"),
)
