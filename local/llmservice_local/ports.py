"""Free TCP ports on the loopback interface."""

from __future__ import annotations

import socket


def free_port(wanted: int = 0) -> int:
    """`wanted` where it is given and free, else one that the kernel picks; raises `OSError` where it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", wanted))
        port: int = probe.getsockname()[1]
        return port
