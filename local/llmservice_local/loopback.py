"""Loopback ports and addresses that no other local cluster on this machine uses.

A claim is an abstract Unix socket, which the kernel releases when this process ends.
"""

from __future__ import annotations

import secrets
import socket

_FIRST, _COUNT = 20_000, 12_000
"""Below Linux's ephemeral ports (32768 and up), so that no outgoing connection takes a port before it is bound."""


def free_port(wanted: int = 0) -> int:
    """`wanted` if it is not 0, else a free port that is claimed until this process ends.

    Raises `OSError` if the port, or every port, is in use.
    """
    if wanted:
        try:
            return _free(wanted)
        except OSError as error:
            reason = str(error.strerror).lower()
            raise OSError(
                f"port {wanted} of 127.0.0.1: {reason}; name another one, or none for any free one"
            ) from error
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
    """Raises `OSError` if another process has claimed the port."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
        claim.bind(f"\0llmservice-port-{port}")
        claim.detach()


class AddressBlock:
    """A claimed block 127.0.B.0/24 of addresses for pods."""

    def __init__(self) -> None:
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._number = self._claim_block()
        self._in_use: set[int] = set()
        self._last = 1

    @property
    def cidr(self) -> str:
        return f"127.0.{self._number}.0/24"

    def take(self) -> str:
        """The free address that has been unused for longest, as clients may still connect to those freed recently."""
        for step in range(253):
            host = (self._last - 1 + step) % 253 + 2
            if host not in self._in_use:
                self._in_use.add(host)
                self._last = host
                return f"127.0.{self._number}.{host}"
        raise RuntimeError(f"all 253 pod addresses of {self.cidr} are in use: delete some pods")

    def release(self, address: str) -> None:
        self._in_use.discard(int(address.rpartition(".")[2]))

    def close(self) -> None:
        self._claim.close()

    def _claim_block(self) -> int:
        start = secrets.randbelow(253)
        for step in range(253):
            number = (start + step) % 253 + 2  # 127.0.0.x and 127.0.1.x have other uses, such as the host name
            try:
                self._claim.bind(f"\0llmservice-pods-127.0.{number}")
            except OSError:
                continue
            return number
        raise RuntimeError("all 253 blocks of loopback addresses are claimed by other local clusters on this machine")
