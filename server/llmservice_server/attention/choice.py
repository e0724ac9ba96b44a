"""Which attention backend runs where."""

from __future__ import annotations

import torch

from llmservice_server.attention.base import AttentionBackend, KVCacheShape
from llmservice_server.attention.torch_backend import TorchAttention


def attention_backend(shape: KVCacheShape, num_blocks: int, device: torch.device) -> AttentionBackend:
    """The fastest for `device`. Raises RuntimeError (torch's word for it) where its cache cannot be allocated."""
    if device.type == "cpu":
        from llmservice_server.attention.cpu_backend import CpuAttention  # brings a compiler along

        return CpuAttention(shape, num_blocks)
    return TorchAttention(shape, num_blocks, device)
