"""CUDA graphs at start: what memory they will take, before the KV cache gets the rest; then the graphs themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from llmservice_server.attention.base import SequenceSlice
from llmservice_server.attention.step_tables import table_width
from llmservice_server.attention.triton_backend import TritonAttention
from llmservice_server.engine.decode_graphs import DecodeBuffers, DecodeGraphs, Replay, capture_sizes
from llmservice_server.models.llama import LlamaModel

_LOG = logging.getLogger(__name__)


class CudaCapture:
    """Implements `Capture`; all graphs share one pool of memory.

    What can't be captured (cuBLAS's workspace, Triton's compiler) is done by a first run, on the very stream that is
    captured then: cuBLAS has a workspace of tens of megabytes for each stream, and never gives it back.
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


def graph_bytes(largest: int, another: int, num_graphs: int) -> int:
    """Of all graphs, from the bytes that the first, the largest, took and what the next one added to it."""
    return largest + another * (num_graphs - 1)


@torch.inference_mode()
def predict_graph_bytes(model: LlamaModel, attention: TritonAttention, max_num_seqs: int, max_model_len: int) -> int:
    """Captures the two largest graphs on a cache of any size, which is dropped again, and measures them."""
    sizes = capture_sizes(max_num_seqs)
    attention.max_length = max_model_len
    buffers = _buffers(attention, sizes[-1], max_model_len)
    capture = CudaCapture()
    kept, taken = [], []
    for size in sizes[:-3:-1]:
        before = free_bytes(model.device)
        kept.append(DecodeGraphs(model, attention, buffers, [size], capture))
        taken.append(before - free_bytes(model.device))
    return buffers.nbytes + graph_bytes(taken[0], max(0, taken[-1]), len(sizes))


@torch.inference_mode()
def capture_graphs(
    model: LlamaModel, attention: TritonAttention, max_num_seqs: int, max_model_len: int, num_blocks: int
) -> DecodeGraphs | None:
    """All graphs, compared with the same steps without them; None, and a warning, where they cannot be used.

    Writes into the blocks from 1 on, so nothing may be cached yet.
    """
    sizes = capture_sizes(max_num_seqs)
    attention.max_length = max_model_len
    try:
        graphs = DecodeGraphs(model, attention, _buffers(attention, sizes[-1], max_model_len), sizes, CudaCapture())
        problem = graphs.what_is_wrong(
            [SequenceSlice(0, 1, [block]) for block in range(1, min(max_num_seqs, num_blocks - 1) + 1)]
        )
    except RuntimeError as error:  # torch's word for CUDA's errors; out of memory is one of them
        problem = str(error).splitlines()[0]
    if problem is not None:
        _LOG.warning("decoding without CUDA graphs: %s", problem)
        return None
    _LOG.info("captured %d CUDA graphs for 1 to %d sequences", len(sizes), sizes[-1])
    return graphs


def _buffers(attention: TritonAttention, max_num_seqs: int, max_model_len: int) -> DecodeBuffers:
    block_size = attention.shape.block_size
    return DecodeBuffers(max_num_seqs, table_width(-(-max_model_len // block_size)), block_size, attention.device)


def free_bytes(device: torch.device) -> int:
    """What nobody has of the card, once its work is done and what torch only keeps for later is given back."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
