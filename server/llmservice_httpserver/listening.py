"""A uvicorn server on the running event loop, and the socket that it listens on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from llmservice_httpserver.protocol import BoundedHttpProtocol

KEEP_ALIVE_S = 620
"""Longer than a gateway's pool or a load balancer (Google's: 600 s) keeps a connection, so that none is reused that the
server closes meanwhile."""
_BACKLOG = 2048  # connections that the kernel holds; what is refused is decided after they are accepted


class ListenError(Exception):
    """A port cannot be listened on: one sentence that names its flag."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: its owner decides when to stop."""

    def __init__(self, app: Any, protocol: type[BoundedHttpProtocol] = BoundedHttpProtocol, **settings: Any) -> None:
        """`settings` are those of `uvicorn.Config`."""
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                log_config=None,
                access_log=False,
                ws="none",
                lifespan="off",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                **settings,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def abort_connections(self) -> None:
        """Close what is left after `serve` has returned: clients that do not read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A listening socket; `::` takes IPv4 too. Raises ListenError, which names the `flag` of the port."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if host == "::":
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # before the log says so
    except OSError as error:
        listener.close()
        why = error.strerror or error
        raise ListenError(f"cannot listen on port {port} of {host}: {why}: choose another {flag} or --host") from error
    return listener
