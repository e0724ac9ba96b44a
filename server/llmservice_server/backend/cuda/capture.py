"""CUDA graphs: recorded work, and its repetition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Replay = Callable[[], None]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]
"""Records work; returns a function that repeats it, and the tensor with the result of each repetition."""


class CudaCapture:
    """Implements `Capture`; all graphs share one pool of memory.

    What cannot be captured (cuBLAS's workspace, Triton's compiler) is done by a first run, on the same stream: cuBLAS
    allocates a workspace of tens of megabytes for each stream and never frees it.
    """

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            answer = work()
        return graph.replay, answer
