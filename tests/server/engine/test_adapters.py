"""Adapters without a device: what is read, and when."""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple

from llmservice_server.engine.adapters import Adapters
from llmservice_server.engine.request import Request
from llmservice_server.types.messages import LoadAdapter, SamplingParams


class Weights(NamedTuple):
    version: str


class Store:
    """Implements `AdapterStore`; reads end when the test says so."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.reads: list[tuple[str, Future[Weights]]] = []

    def read(self, folder: str) -> Future[Weights]:
        self.reads.append((folder, Future()))
        return self.reads[-1][1]

    def put(self, slot: int, weights: Weights) -> None:
        pass

    @property
    def begun(self) -> str:
        return "".join(folder for folder, _ in self.reads)

    def finish(self) -> None:
        folder, future = self.reads[-1]
        future.set_result(Weights(folder))


def load(adapters: Adapters, name: str) -> None:
    adapters.change(LoadAdapter(request_id=name, name=name, folder=name))


def request(adapter: str) -> Request:
    sampling, nothing = SamplingParams(max_tokens=1), frozenset[int]()
    return Request(adapter, [1], 1, sampling, nothing, 0, "interactive", (0, 0, 0), 0.0, adapter_name=adapter)


def test_the_next_adapter_is_read_when_the_one_before_is_in_its_slot() -> None:
    store = Store(2)
    adapters = Adapters(store)
    for name in "abcd":
        load(adapters, name)
    for begun in ("a", "ab", "abc", "abcd"):
        assert store.begun == begun
        store.finish()
        assert store.begun == begun, "until the next step, the weights are held beside the slots"
        adapters.take_ready(idle=False)
    assert [info.state for info in adapters.take_reports()[-1].adapters] == ["evicted", "evicted", "loaded", "loaded"]
    for name in "ab":
        adapters.add(request(name))
    assert adapters.take_ready(idle=False) == []
    assert store.begun == "abcda"
    store.finish()
    ready = [each.adapter_name for each, _ in adapters.take_ready(idle=False)]
    assert (ready, store.begun) == (["a"], "abcdab")
    store.finish()
    assert [each.adapter_name for each, _ in adapters.take_ready(idle=False)] == ["b"]
    adapters.take_reports()
    assert not adapters
