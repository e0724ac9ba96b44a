"""How large what is measured is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from card.llama import LLAMA_3_8B
from llmservice_bench.lengths import Lengths
from llmservice_server.attention.agreement import MIXED, Spans

_LONG: Spans = ((4095, 1), (0, 1000), (2047, 513), (300, 1), (0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """By what they are for, in the order of the sections."""

    config: dict[str, Any]
    """Of the checkpoint, as Hugging Face writes it."""
    copy_bytes: int
    matrix: int  # rows and columns of the matrices whose product is a ceiling
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    context: int  # tokens that a sequence has when its decode steps are measured
    decode_batches: tuple[int, ...]
    step_prompts: tuple[int, ...]
    step_repetitions: int
    waiting_batch: int  # sequences while the host's waits are counted
    loop_steps: int  # of a decode loop that is watched
    in_flight: int
    requests: int
    longest: Lengths  # that the trace is scaled to
    peer_tokens: int
    """Of a step of the peer's: its mask is a number for each of them and each token that the cache has room for."""
    peer_s: float
    """That the peer may take, so that a slow one costs no other section its time; what it has drawn by then counts."""
    kernel_batches: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]  # tokens of a step, and of each of its prompts
    cold_bytes: int  # that are read between two reads of the same cache: more than the card's L2 holds
    head_dims: tuple[int, ...]
    block_sizes: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]  # heads of queries, and of keys
    spans: tuple[Spans, ...]
    race_tokens: tuple[int, ...]
    sampling_batches: tuple[int, ...]
    swapped_blocks: int
    memory_prompt: int  # tokens of the request that needs more memory than is left
    memory_tokens: int  # that others are drawn meanwhile
    left_bytes: int
    loop_batches: tuple[int, ...]
    busy_batch: int
    overlap_kv_bytes: int | None  # of each of two engines; None: what the card has for them

    @property
    def heads(self) -> tuple[int, int, int]:
        """The model's heads of queries and of keys, and how wide they are."""
        heads = self.config["num_attention_heads"]
        return heads, self.config["num_key_value_heads"], self.config["hidden_size"] // heads

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.config["torch_dtype"]]


FULL = Sizes(
    config=LLAMA_3_8B,
    copy_bytes=4 << 30, matrix=8192,
    max_num_seqs=256, max_model_len=8192, max_num_batched_tokens=8192,
    context=1024, decode_batches=(1, 2, 4, 8, 16, 32, 64), step_prompts=(2048, 8192), step_repetitions=20,
    waiting_batch=32, loop_steps=30,
    in_flight=256, requests=512, longest=Lengths(4096, 512), peer_tokens=1024, peer_s=75.0,
    kernel_batches=(1, 8, 32, 64, 256), prompts=((2048, 2048), (8192, 8192), (8192, 1024)), cold_bytes=256 << 20,
    head_dims=(64, 96, 128, 256), block_sizes=(16, 64, 256), groups=((8, 2), (7, 1), (4, 4)), spans=(MIXED, _LONG),
    race_tokens=(256, 512, 1024, 2048),
    sampling_batches=(8, 64, 256),
    swapped_blocks=256,
    memory_prompt=8000, memory_tokens=60, left_bytes=96 << 20,
    loop_batches=(8, 64, 256), busy_batch=64, overlap_kv_bytes=None,
)  # fmt: skip
"""Llama 3 8B, on a card of 80 GB and more."""
