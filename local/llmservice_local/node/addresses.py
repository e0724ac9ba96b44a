"""Loopback addresses for pods: 127.0.B.2 to 127.0.B.254 of a block that this machine's other clusters leave alone."""

from __future__ import annotations

import secrets
import socket


class AddressBlock:
    """A claimed 127.0.B.0/24. The claim is an abstract Unix socket, which the kernel gives up when the process ends."""

    def __init__(self) -> None:
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._number = self._claim_block()
        self._in_use: set[int] = set()
        self._last = 1

    @property
    def cidr(self) -> str:
        return f"127.0.{self._number}.0/24"

    def take(self) -> str:
        """A free address; the longest unused ones come first, as clients may still remember the others."""
        for step in range(253):
            host = (self._last - 1 + step) % 253 + 2
            if host not in self._in_use:
                self._in_use.add(host)
                self._last = host
                return f"127.0.{self._number}.{host}"
        raise RuntimeError(f"all 253 pod addresses of {self.cidr} are in use: delete some pods")

    def give_back(self, address: str) -> None:
        self._in_use.discard(int(address.rpartition(".")[2]))

    def close(self) -> None:
        self._claim.close()

    def _claim_block(self) -> int:
        start = secrets.randbelow(253)
        for step in range(253):
            number = (start + step) % 253 + 2  # 127.0.0.x and 127.0.1.x have other uses, the host's own name among them
            try:
                self._claim.bind(f"\0llmservice-pods-127.0.{number}")
            except OSError:
                continue
            return number
        raise RuntimeError("all 253 blocks of loopback addresses are claimed by other local clusters on this machine")
