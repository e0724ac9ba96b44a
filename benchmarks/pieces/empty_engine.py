"""An engine around a model that computes nothing: what is left is what a step costs on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from llmservice_server.attention.base import Attend, KVCacheShape
from llmservice_server.attention.choice import choose_attention
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.engine.memory import KVCachePlan
from llmservice_server.engine.runner import ModelRunner
from llmservice_server.engine.startup import Started
from llmservice_server.models.llama import LlamaModel
from llmservice_server.models.model_config import ModelConfig
from llmservice_server.models.rope import RopeConfig

BLOCK_SIZE = 16


class EmptyModel(LlamaModel):
    """A Llama without layers: each token leads to another, always the same, in words where `printable` names them.

    Its steps begin `period_s` apart, or later where the rest takes longer; `spent_s` is what its own products took.
    """

    def __init__(self, vocab_size: int, printable: list[int], period_s: float) -> None:
        super().__init__(_shape(vocab_size), torch.float32, torch.device("cpu"))
        dice = torch.Generator().manual_seed(0)
        self.embed_tokens.normal_(generator=dice)
        self.norm.fill_(1.0)
        self.lm_head.weight.zero_()
        self.lm_head.weight[printable] = torch.randn(len(printable), self.config.hidden_size, generator=dice)
        self.finish_loading()
        self.spent_s = 0.0
        self._period_s = period_s
        self._next_s = 0.0

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        if self._period_s:
            time.sleep(max(0.0, self._next_s - time.monotonic()))
            self._next_s = max(time.monotonic(), self._next_s + self._period_s)
        started_s = time.perf_counter()
        hidden = super().forward(token_ids, positions, attend)
        self.spent_s += time.perf_counter() - started_s
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        started_s = time.perf_counter()
        logits = super().logits(hidden)
        self.spent_s += time.perf_counter() - started_s
        return logits


def empty_engine(model: EmptyModel, num_seqs: int, num_tokens_each: int) -> Engine:
    """Everything but the model is real, and there is room for `num_seqs` sequences of `num_tokens_each`."""
    config = EngineConfig(model=Path("empty"), max_num_seqs=num_seqs, max_num_batched_tokens=max(2048, num_seqs))
    return Engine(config, start=_started(model, num_seqs, num_tokens_each))


def _started(model: EmptyModel, num_seqs: int, num_tokens_each: int) -> Callable[[EngineConfig], Started]:
    num_blocks = 1 + num_seqs * -(-num_tokens_each // BLOCK_SIZE)
    heads = (model.config.num_heads, model.config.num_kv_heads, model.config.head_dim)
    shape = KVCacheShape(*heads, windows=(), block_size=BLOCK_SIZE, dtype=torch.float32)
    choice = choose_attention("auto", shape, model.dtype, model.device, max_num_batched_tokens=num_seqs)
    started = Started(
        runner=ModelRunner(model, choice.backend(num_blocks, model.device)),
        kv_cache=KVCachePlan(num_blocks, num_tokens_each),
        max_num_seqs=num_seqs,
        memory_bytes={},
        vocab_size=model.config.vocab_size,
        eos_token_ids=frozenset(),
        swap=None,
    )
    return lambda _: started


def _shape(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_layers=0,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=10000.0, kind="default", scaling={}),
        windows=(),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_embeddings=False,
        dtype="float32",
    )
