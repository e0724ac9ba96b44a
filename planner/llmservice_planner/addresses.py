"""Network addresses, IPv4 and IPv6."""

from __future__ import annotations

import socket

ANY_ADDRESS = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
"""All of this machine: a pod may have IPv4, IPv6 or both."""


def endpoint(host: str, port: int) -> str:
    """As it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
