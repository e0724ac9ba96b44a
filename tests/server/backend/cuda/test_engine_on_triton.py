"""End to end: the engine on our GPU kernels, interpreted, gives the tokens that it gives on the CPU's: float32."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from harness.checkpoints.families import OTHERS, save
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda import decode_graphs
from llmservice_server.backend.cuda.backend import CudaBackend
from llmservice_server.backend.cuda.capture import Replay
from llmservice_server.backend.cuda.experts import CudaExperts
from llmservice_server.engine.config import EngineConfig
from llmservice_server.runtime.loader import Checkpoint
from llmservice_server.runtime.startup import load_engine
from llmservice_server.tiny.adapter import write_tiny_adapter
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from llmservice_server.types.messages import GenerateRequest, LoadAdapter, SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 7
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    spec = TinyModelSpec(layers=2, hidden_size=32, heads=4, kv_heads=2, vocab_size=512, max_position_embeddings=128)
    write_tiny_model(folder, spec)
    return folder


def tokens_of(
    folder: Path, layers: int = 2, adapters: Mapping[str, Path | None] = MappingProxyType({}), **settings: Any
) -> dict[str, list[int]]:
    """Two requests that begin alike, one that joins later, chunked prompts, and a pool that makes them preempt.

    adapters: the folder of a request's.
    """
    config = EngineConfig(
        model=folder, threads=1, max_model_len=48, max_num_seqs=3, prefill_chunk_tokens=16, max_num_batched_tokens=24,
        kv_cache_memory_bytes=6 * 16 * 2 * layers * 2 * 8 * 4, **settings,
    )  # fmt: skip
    engine = load_engine(config, clock=lambda: 100.0)
    for name, adapter in adapters.items():
        engine.change_adapter(LoadAdapter(request_id=f"load {name}", name=name, folder=str(adapter)))
        while not (reports := engine.step().adapters):
            pass
        assert reports[0].error is None
    shared = list(range(3, 24))
    prompts = {"a": [*shared, 50, 51], "b": [*shared, 60], "c": [7, 5, 3]}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}

    def add(name: str) -> None:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        given: dict[str, Any] = {"adapter": name} if name in adapters else {}
        prompt = prompts[name]
        engine.add(
            GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_s=100.0, **given)
        )

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


def test_decode_steps_with_adapters_are_graphs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a double of CUDA's graphs, which repeats the work that it has seen."""
    replayed = []

    class Capture:
        def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
            output = work()

            def replay() -> None:
                replayed.append(len(output))
                output.copy_(work())

            return replay, output

    monkeypatch.setattr(CudaBackend, "_captures", True)
    monkeypatch.setattr(decode_graphs, "CudaCapture", Capture)
    monkeypatch.setattr(decode_graphs, "cuda_free_bytes", lambda _: 0)
    monkeypatch.setattr(decode_graphs, "MIXED_SIZES", range(64, 65))
    adapters = {name: tmp_path / name for name in ("a", "c")}
    for seed, path in enumerate(adapters.values()):
        write_tiny_adapter(path, folder, rank=4, seed=seed, std=0.3)
    settings: dict[str, Any] = {"adapters": adapters, "max_loras": 2, "max_lora_rank": 4}
    with_graphs = tokens_of(folder, attention="triton", overlap=True, **settings)
    assert replayed.count(2) + replayed.count(4) > NUM_TOKENS
    monkeypatch.undo()
    assert with_graphs == tokens_of(folder, **settings) != tokens_of(folder)


@pytest.mark.parametrize("family", ["olmoe", "llama4, chunks, and queries that grow with the position"])
def test_experts_of_transformers_models_are_computed_by_our_product(tmp_path: Path, family: str) -> None:
    save(OTHERS[family], tmp_path)
    model = Checkpoint.open(tmp_path).load(torch.float32, CPU)
    CudaBackend(KVCacheShape.of(model.config, 16, torch.float32), CPU, "a test").prepare(model)
    experts = [type(mixture.experts) for mixture in model.mixtures()]
    assert experts == [CudaExperts] * 3


def test_a_model_of_transformers_has_the_tokens_of_the_cpu_backend(tmp_path: Path) -> None:
    save(OTHERS["olmoe"], tmp_path)
    assert tokens_of(tmp_path, layers=3, attention="triton") == tokens_of(tmp_path, layers=3)
