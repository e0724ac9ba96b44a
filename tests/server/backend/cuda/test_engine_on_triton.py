"""End to end: the engine on our GPU kernels, interpreted, gives the tokens that it gives on the CPU's: float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.families import OTHERS, save
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda.backend import CudaBackend
from llmservice_server.backend.cuda.experts import CudaExperts
from llmservice_server.engine.config import EngineConfig
from llmservice_server.runtime.loader import Checkpoint
from llmservice_server.runtime.startup import load_engine
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from llmservice_server.types.messages import GenerateRequest, SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 7
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    spec = TinyModelSpec(layers=2, hidden_size=32, heads=4, kv_heads=2, vocab_size=512, max_position_embeddings=128)
    write_tiny_model(folder, spec)
    return folder


def tokens_of(folder: Path, layers: int = 2, **settings: Any) -> dict[str, list[int]]:
    """Two requests that begin alike, one that joins later, chunked prompts, and a pool that makes them preempt."""
    config = EngineConfig(
        model=folder, threads=1, max_model_len=48, max_num_seqs=3, prefill_chunk_tokens=16, max_num_batched_tokens=24,
        kv_cache_memory_bytes=6 * 16 * 2 * layers * 2 * 8 * 4, **settings,
    )  # fmt: skip
    engine = load_engine(config, clock=lambda: 100.0)
    shared = list(range(3, 24))
    prompts = {"a": [*shared, 50, 51], "b": [*shared, 60], "c": [7, 5, 3]}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}

    def add(name: str) -> None:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        engine.add(GenerateRequest(request_id=name, prompt_token_ids=prompts[name], sampling=sampling, arrival_s=100.0))

    add("a")
    add("b")
    for step in range(60):
        if step == 4:
            add("c")
        for output in engine.step().outputs:
            assert output.error is None
            tokens[output.request_id] += output.token_ids
        if step > 4 and not engine.has_work:
            break
    assert all(len(each) == NUM_TOKENS for each in tokens.values())
    return tokens


def test_greedy_tokens_are_those_of_the_cpu_backend(folder: Path) -> None:
    assert tokens_of(folder, attention="triton", overlap=True) == tokens_of(folder)


def test_experts_of_transformers_models_are_computed_by_our_product(tmp_path: Path) -> None:
    save(OTHERS["olmoe"], tmp_path)
    model = Checkpoint.open(tmp_path).load(torch.float32, CPU)
    CudaBackend(KVCacheShape.of(model.config, 16, torch.float32), CPU, "a test").prepare(model)
    experts = [type(mixture.experts) for mixture in model.mixtures()]
    assert experts == [CudaExperts] * 3
    assert tokens_of(tmp_path, layers=3, attention="triton") == tokens_of(tmp_path, layers=3)
