"""`llmservice signing-key`: the Secret with the key that the gateway signs requests with, new or rotated."""

from __future__ import annotations

import argparse
import base64
import sys
import time
from typing import Any

from llmservice_planner.command import Command, CommandError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--name", default="llmservice-gateway-signing", metavar="NAME", help="of the Secret")
    add("-n", "--namespace", metavar="NAMESPACE", help="the gateway's (default: the one that kubectl applies to)")
    add(
        "--rotate",
        action="store_true",
        help="read the present Secret from standard input (kubectl get secret NAME -o yaml), keep its present key, and "
        "add one that replaces it",
    )
    add(
        "--after",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="with --rotate: when the new key replaces the present one; all pods must have its public half by then",
    )


def _run(args: argparse.Namespace) -> int:
    import yaml

    from llmservice_gateway.signing import SigningKey, SigningKeyError, parse_signing_keys, rotated, signing_secret

    now = time.time()
    if args.after < 0:
        raise CommandError(f"--after is {args.after:g}, expected seconds, 0 or more")
    if args.rotate:
        try:
            present = yaml.safe_load(sys.stdin)
            keys = rotated(parse_signing_keys(_signing_field(present)), now, args.after)
        except (yaml.YAMLError, SigningKeyError) as error:
            why = error if isinstance(error, SigningKeyError) else "it is not valid YAML"
            raise CommandError(f"standard input does not hold the present Secret: {why}") from None
        metadata = present.get("metadata") or {}
        name, namespace = metadata.get("name", args.name), metadata.get("namespace", args.namespace)
        manifest = signing_secret(name, keys, namespace)
    else:
        from datetime import UTC, datetime

        manifest = signing_secret(args.name, [SigningKey.new(datetime.fromtimestamp(now, UTC))], args.namespace)
    yaml.safe_dump(manifest, sys.stdout, sort_keys=False)
    return 0


def _signing_field(secret: Any) -> str:
    """Of a Secret as the API server returns it, or as this command has printed it."""
    from llmservice_gateway.signing import SIGNING_FIELD, SigningKeyError

    if isinstance(secret, dict):
        if SIGNING_FIELD in (secret.get("stringData") or {}):
            return str(secret["stringData"][SIGNING_FIELD])
        if SIGNING_FIELD in (secret.get("data") or {}):
            try:
                return base64.b64decode(secret["data"][SIGNING_FIELD], validate=True).decode()
            except ValueError:
                raise SigningKeyError(f"its {SIGNING_FIELD} is not base64") from None
    raise SigningKeyError(f"it has no {SIGNING_FIELD}")


COMMAND = Command(
    help="make or rotate the key that the gateway signs requests to pods with: a Secret on standard output",
    add_arguments=_add_arguments,
    run=_run,
    extra="gateway",
    requires=("cryptography", "jwt"),
)
