"""`llmservice signing-key`: the Secret with the key that the gateway signs requests with, new or rotated."""

from __future__ import annotations

import argparse
import base64
import math
import sys
import time
from typing import Any

from llmservice_planner.command import Command, CommandError
from llmservice_planner.key_file import KeyFileError

_AFTER_S = 600.0


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
        metavar="SECONDS",
        help="with --rotate: when the new key replaces the present one; all pods must have its public half by then "
        f"(default: {_AFTER_S:g})",
    )


def _run(args: argparse.Namespace) -> int:
    import yaml

    from llmservice_gateway.access.signing import SigningKey, parse_signing_keys, rotated, signing_secret

    now = time.time()
    after_s = _AFTER_S if args.after is None else args.after
    if not 0 <= after_s < math.inf:
        raise CommandError(f"--after is {after_s:g}, expected seconds, 0 or more")
    if args.after is not None and not args.rotate:
        raise CommandError("--after is about the key that --rotate adds: a first key signs at once")
    if args.rotate:
        try:
            present = yaml.safe_load(sys.stdin)
            keys = rotated(parse_signing_keys(_signing_field(present)), now, after_s)
        except (yaml.YAMLError, KeyFileError) as error:
            why = error if isinstance(error, KeyFileError) else "it is not valid YAML"
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
    from llmservice_gateway.access.signing import SIGNING_FIELD

    if isinstance(secret, dict):
        if SIGNING_FIELD in (secret.get("stringData") or {}):
            return str(secret["stringData"][SIGNING_FIELD])
        if SIGNING_FIELD in (secret.get("data") or {}):
            try:
                return base64.b64decode(secret["data"][SIGNING_FIELD], validate=True).decode()
            except ValueError:
                raise KeyFileError(f"its {SIGNING_FIELD} is not base64") from None
    raise KeyFileError(f"it has no {SIGNING_FIELD}")


COMMAND = Command(
    help="make or rotate the key that the gateway signs requests to pods with: a Secret on standard output",
    add_arguments=_add_arguments,
    run=_run,
    extra="gateway",
    requires=("cryptography", "jwt"),
)
