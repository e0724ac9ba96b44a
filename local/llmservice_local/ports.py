"""Free TCP ports on the loopback interface, for processes that must be told theirs before they can bind it."""

from __future__ import annotations

import secrets
import socket

_FIRST, _COUNT = 20_000, 12_000
"""Below what Linux hands out to outgoing connections (32768 and up), so that none takes a port between the two."""


def free_port(wanted: int = 0) -> int:
    """`wanted` where it is given and free, else one that no other cluster on this machine is given while we run.

    Raises `OSError` where the port is taken, or all are.
    """
    if wanted:
        return _free(wanted)
    start = secrets.randbelow(_COUNT)
    for step in range(_COUNT):
        port = _FIRST + (start + step) % _COUNT
        try:
            _claim(port)
            return _free(port)
        except OSError:
            continue
    raise OSError(f"no TCP port between {_FIRST} and {_FIRST + _COUNT - 1} is free on 127.0.0.1")


def _free(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    return port


def _claim(port: int) -> None:
    """An abstract Unix socket, which the kernel gives up when this process ends; raises `OSError` where it is there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
        claim.bind(f"\0llmservice-port-{port}")
        claim.detach()
