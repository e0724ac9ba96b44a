"""An engine with a model that computes nothing, to measure the host's part of a step."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from llmservice_server.backend.base import Attend
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.choice import choose_backend
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.engine.interfaces import KVCachePlan, Started
from llmservice_server.models.config import ModelConfig
from llmservice_server.models.decoder import DecoderModel
from llmservice_server.models.llama import llama_layer
from llmservice_server.models.rope import RopeConfig
from llmservice_server.models.weights import Weights
from llmservice_server.runtime.embedding_model import EmbeddingModel
from llmservice_server.runtime.embeddings import BatchEmbedder
from llmservice_server.runtime.runner import ModelRunner
from llmservice_server.runtime.vector_format import VectorFormat
from llmservice_server.sampling.grammar import GrammarCompiler

BLOCK_SIZE = 16


class EmptyModel(DecoderModel):
    """A Llama without layers, in which each token determines the next; `printable` are the tokens that it uses.

    Its steps start at least `period_s` apart, and take `token_s` for each of their tokens; `spent_s` is the time of its
    own operations.
    """

    def __init__(self, vocab_size: int, printable: list[int], period_s: float, token_s: float = 0.0) -> None:
        super().__init__(_shape(vocab_size), Weights(torch.float32, torch.device("cpu")), llama_layer)
        dice = torch.Generator().manual_seed(0)
        self.embed_tokens.normal_(generator=dice)
        self.norm.fill_(1.0)
        self.lm_head.weight.zero_()
        self.lm_head.weight[printable] = torch.randn(len(printable), self.config.hidden_size, generator=dice)
        self.spent_s = 0.0
        self._period_s, self._token_s = period_s, token_s
        self._next_s = 0.0

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        if self._period_s:
            time.sleep(max(0.0, self._next_s - time.monotonic()))
            self._next_s = max(time.monotonic(), self._next_s + self._period_s)
            time.sleep(self._token_s * len(token_ids))
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
    """An engine with this model and room for `num_seqs` sequences of `num_tokens_each`."""
    config = EngineConfig(model=Path("empty"), max_num_seqs=num_seqs, max_num_batched_tokens=max(2048, num_seqs))
    return Engine(config, _started(model, config, num_seqs, num_tokens_each))


def _started(model: EmptyModel, config: EngineConfig, num_seqs: int, num_tokens_each: int) -> Started:
    num_blocks = 1 + num_seqs * (1 + -(-num_tokens_each // BLOCK_SIZE))  # one more, or the last might wait
    heads = (model.config.num_heads, model.config.num_kv_heads, model.config.head_dim)
    shape = KVCacheShape(*heads, windows=(), block_size=BLOCK_SIZE, dtype=torch.float32)
    backend = choose_backend("auto", shape, model.dtype, model.device, max_num_batched_tokens=num_seqs)
    backend.prepare(model)
    runner = ModelRunner(model, backend.attention(num_blocks), backend)
    return Started(
        architecture="LlamaForCausalLM",
        model_code="own",
        runner=runner,
        embedder=BatchEmbedder(
            EmbeddingModel(model, VectorFormat.plain(model.config.hidden_size)),
            runner.recover,
            vocab_size=model.config.vocab_size,
            max_tokens=num_tokens_each,
            max_batch_tokens=config.step_tokens,
            window_s=config.embedding_window_s,
        ),
        grammars=GrammarCompiler(config.model, model.config.vocab_size),
        kv_cache=KVCachePlan(num_blocks, num_tokens_each, backend.shape.block_groups(config.step_tokens)),
        max_num_seqs=num_seqs,
        memory_bytes={},
        vocab_size=model.config.vocab_size,
        eos_token_ids=frozenset(),
    )


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
