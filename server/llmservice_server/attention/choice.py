"""Which attention backend runs where, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from llmservice_server.attention.base import AttentionBackend, KVCacheShape
from llmservice_server.attention.torch_backend import TorchAttention
from llmservice_server.attention.varlen import Varlen, by_torch
from llmservice_server.engine.errors import ConfigError

BackendName = Literal["cpu", "torch", "triton"]


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A backend for one model's cache."""

    shape: KVCacheShape
    name: BackendName
    reason: str
    varlen_keys: int = 0  # chunks of steps with up to so many keys are computed by torch's varlen_attn
    worth_compiling: bool = False  # whether a CPU is to have kernels that take seconds to compile

    def backend(self, num_blocks: int, device: torch.device) -> AttentionBackend:
        """Raises RuntimeError (torch's word for it) where its cache cannot be allocated."""
        if self.name == "cpu":
            from llmservice_server.attention.cpu_backend import CpuAttention  # brings a compiler along

            return CpuAttention(self.shape, num_blocks, tiled=self.worth_compiling)
        if self.name == "triton":
            from llmservice_server.attention.triton_backend import TritonAttention

            varlen = Varlen(by_torch, self.varlen_keys) if self.varlen_keys else None
            return TritonAttention(self.shape, num_blocks, device, varlen)
        return TorchAttention(self.shape, num_blocks, device)


def choose_attention(
    wanted: Literal["auto", "torch", "triton"],
    shape: KVCacheShape,
    dtype: torch.dtype,
    device: torch.device,
    max_num_batched_tokens: int,
) -> AttentionChoice:
    """For activations of `dtype`. Raises ConfigError where what is wanted does not work here.

    `auto` has chunks of prompts raced on a card, our kernel against torch's, and takes the faster.
    """
    problem = None
    if wanted == "triton" or (wanted == "auto" and device.type == "cuda"):
        from llmservice_server.attention.probe import why_triton_is_unusable

        problem = why_triton_is_unusable(shape, dtype, device)
    name, reason = decide(wanted, device.type, problem)
    if shape.dtype.itemsize == 1 and name != "triton":
        raise ConfigError(
            f"kv_cache_dtype fp8 needs the attention backend triton, which is not used here ({reason}): "
            "choose another --kv-cache-dtype"
        )
    if wanted != "auto" or name != "triton":
        return AttentionChoice(shape, name, reason)
    from llmservice_server.attention.chunk_race import OURS, race_for_chunks

    verdict = race_for_chunks(shape, dtype, device, max_num_batched_tokens)
    return AttentionChoice(
        shape,
        name,
        f"{reason}; chunks of prompts by {verdict.name}: {verdict.reason}",
        0 if verdict.name == OURS else max_num_batched_tokens,
    )


def decide(
    wanted: Literal["auto", "torch", "triton"], device_type: str, triton_problem: str | None
) -> tuple[BackendName, str]:
    """The backend and the reason for it. `triton_problem`: what the probe found, None where nothing."""
    if wanted == "torch":
        return "torch", "it was asked for"
    if wanted == "triton":
        if triton_problem is not None:
            raise ConfigError(f"attention is triton, which is unusable here: {triton_problem}: use --attention auto")
        return "triton", "it was asked for, and its probe passed"
    if device_type == "cpu":
        return "cpu", "the kernels for this processor are the fastest on it"
    if triton_problem is not None:
        return "torch", f"triton is unusable here: {triton_problem}"
    return "triton", "its kernels compiled and agreed with torch on this card"
