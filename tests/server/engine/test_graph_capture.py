"""What a capture asks of CUDA, and in which order; a double takes its place, as there is no card."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import harness.triton_interpreter  # noqa: F401
from llmservice_server.engine.graph_capture import CudaCapture, graph_bytes


def test_the_first_graph_takes_the_memory_that_the_others_share() -> None:
    assert graph_bytes(largest=1000, another=10, num_graphs=35) == 1340
    assert graph_bytes(largest=1000, another=1000, num_graphs=1) == 1000


class Cuda:
    """Notes down what is asked of it, with the stream that is current then."""

    def __init__(self) -> None:
        self.current, self.asked, self.num_streams = "main", list[tuple[str, ...]](), 0

    def new_stream(self) -> "Stream":
        self.num_streams += 1
        return Stream(self, f"side {self.num_streams}")

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    @contextmanager
    def capturing(self, graph: "Graph", pool: str, stream: "Stream") -> Iterator[None]:
        self.asked.append(("begin", pool, stream.name))
        with self.on(stream):
            yield
        self.asked.append(("end", pool, stream.name))


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: "Stream") -> None:
        self.cuda.asked.append((self.name, "waits for", other.name))


class Graph:
    def replay(self) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    double = Cuda()
    for name, stands_in in {
        "Stream": double.new_stream,
        "stream": double.on,
        "current_stream": lambda: Stream(double, double.current),
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": Graph,
        "graph": double.capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)
    return double


def test_what_is_captured_has_run_before_on_the_same_stream_whichever_graph_it_is(cuda: Cuda) -> None:
    """What a library makes when it first runs, and keeps for each stream, is neither captured nor made twice."""
    answer = torch.zeros(1)

    def work() -> torch.Tensor:
        cuda.asked.append(("work", cuda.current))
        return answer

    capture = CudaCapture()
    each: list[Any] = [
        ("side 1", "waits for", "main"),
        ("work", "side 1"),
        ("main", "waits for", "side 1"),
        ("begin", "pool", "side 1"),
        ("work", "side 1"),
        ("end", "pool", "side 1"),
    ]
    for _ in range(2):
        replay, kept = capture(work)
        assert kept is answer
        assert callable(replay)
    assert cuda.asked == each * 2
