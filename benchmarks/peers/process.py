"""A peer in a process of its own that stays, so that peers can be asked in turns."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

from peers.workload import Answer, Ask, Job


class Peer(Protocol):
    """Something that serves: made of a Job, which warms it up."""

    def serve(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answers in the order of `asks`, with the job's number of them in flight."""

    def close(self) -> None:
        """Give back its memory and threads."""


class PeerProcess:
    """One peer, named as `module:what makes it of a Job`. It serves one job after the other, and is idle in between."""

    def __init__(self, name: str) -> None:
        self._name = name
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_obey, args=(name, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def load(self, job: Job) -> None:
        """Make ready for a job, in place of the one before."""
        self._ask(job)

    def serve(self, asks: Sequence[Ask]) -> list[Answer]:
        answers: list[Answer] = self._ask(list(asks))
        return answers

    def _ask(self, order: Job | list[Ask]) -> Any:
        try:
            self._pipe.send(order)
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"{self._name} has died: its process says above of what") from error


def _obey(name: str, orders: Connection) -> None:
    """In the peer's process, until nobody is left to give orders."""
    module, _, made = name.partition(":")
    make = getattr(import_module(module), made)
    peer: Peer | None = None
    while True:
        try:
            order = orders.recv()
        except EOFError:
            break
        if isinstance(order, Job):
            if peer is not None:
                peer.close()
            peer = make(order)
            orders.send(None)
        elif peer is not None:
            orders.send(peer.serve(order))
    if peer is not None:
        peer.close()
