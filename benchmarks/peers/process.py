"""Runs a peer (an engine that is compared with ours) in its own process, so that peers can alternate."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

from peers.workload import Answer, Job, PeerRequest


class Peer(Protocol):
    """An engine, created and warmed up with a Job."""

    def serve(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        """The answers in the order of `requests`, with the job's number of requests in flight."""

    def close(self) -> None:
        """Release memory and threads."""


class PeerProcess:
    """The process of the peer `module:factory`, whose factory takes a Job. It serves jobs one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve_orders, args=(name, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def load(self, job: Job) -> None:
        """Replace the job."""
        self._ask(job)

    def serve(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        answers: list[Answer] = self._ask(list(requests))
        return answers

    def _ask(self, order: Job | list[PeerRequest]) -> Any:
        try:
            self._pipe.send(order)
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"{self._name} has died ({self._ending()}): see its output above") from error

    def _ending(self) -> str:
        """How the process ended, whose pipe is closed already: the name of the signal, or its exit code."""
        self._process.join()
        code = self._process.exitcode or 0
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _serve_orders(name: str, orders: Connection) -> None:
    """The main loop of the peer's process, until the pipe is closed."""
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
