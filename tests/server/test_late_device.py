"""On a device that computes as late as CUDA may, the engine gives the tokens that it gives on the CPU."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.engine_driver import serve
from harness.gpu.late_device import CUDA, POISON, Event, LateDevice, OrderError, Stream, late_device
from llmservice_server.backend.base import Decoder
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda.attention import TritonAttention
from llmservice_server.backend.cuda.backend import CudaBackend
from llmservice_server.backend.cuda.capture import CudaCapture
from llmservice_server.backend.cuda.decode_graphs import DecodeBuffers, DecodeGraphs, StepGraphs
from llmservice_server.backend.cuda.experts import CudaExperts
from llmservice_server.backend.cuda.mixed_graphs import MixedGraphs
from llmservice_server.backend.experts import ExpertsMlp
from llmservice_server.backend.transfer import HostCopy, tables_to_device, to_device
from llmservice_server.engine.block_pool import PreemptionCost, SwapSpace
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.engine.interfaces import BlockCopy, Started
from llmservice_server.runtime.loader import Checkpoint
from llmservice_server.runtime.runner import ModelRunner, SwappedBlocks
from llmservice_server.runtime.startup import start
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from llmservice_server.types.messages import GenerateRequest, SamplingParams

POISONED = int.from_bytes([POISON] * 4)
NUM_BLOCKS, SWAP_BLOCKS, NUM_TOKENS = 7, 8, 9
REQUESTS: list[tuple[int, dict[str, Any]]] = [  # tokens of the prompt, and what its request asks
    (20, {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.3, "logprobs": 1}),
    (25, {"temperature": 0.9, "top_p": 0.9, "seed": 5, "prompt_logprobs": 1}),
    (30, {"temperature": 1.2, "top_k": 30, "logit_bias": {7: 3.0}, "min_tokens": 5}),
]


@pytest.fixture(scope="module", params=["dense", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    spec = TinyModelSpec(layers=1, hidden_size=32, heads=4, kv_heads=2, vocab_size=512, max_position_embeddings=128)
    write_tiny_model(folder, spec)
    if request.param == "experts":
        from transformers import MixtralConfig, MixtralForCausalLM  # after Triton was made an interpreter

        config = MixtralConfig(**json.loads((folder / "config.json").read_text()), num_local_experts=4)
        torch.manual_seed(0)
        MixtralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> Started:
    return start(EngineConfig(model=folder, threads=1, kv_cache_memory_bytes=1 << 16, max_num_seqs=3))


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with late_device() as device:
        yield device


def on_late_device(on_cpu: Started, folder: Path, *, graphs: bool) -> Started:
    model = Checkpoint.open(folder).load(torch.float32, CUDA)
    for layer in model.layers if isinstance(model, Decoder) else ():
        if isinstance(layer.mlp, ExpertsMlp):
            product = CudaExperts.of(layer.mlp.experts)
            assert product is not None
            layer.mlp.experts = product
    shape = KVCacheShape.of(model.config, 16, torch.float32)
    attention = TritonAttention(shape, NUM_BLOCKS + 1, CUDA)
    swapped = SwappedBlocks(attention.caches, SWAP_BLOCKS)
    runner = ModelRunner(model, attention, CudaBackend(shape, CUDA, "a test"), swapped)
    if graphs:
        with torch.inference_mode():
            buffers = DecodeBuffers(attention, 3, 8)
            capture = CudaCapture()
            decodes = DecodeGraphs(model, attention, buffers, [1, 3], capture)
            mixed = MixedGraphs(model, attention, [64], capture)
            runner.decode_path = StepGraphs(model, attention, decodes, capture, mixed)
    swap = SwapSpace(SWAP_BLOCKS, PreemptionCost(copy_block_s=0.0, compute_token_s=1.0))
    return replace(on_cpu, runner=runner, swap=swap, overlaps=True)


def tokens_of(started: Started, folder: Path) -> tuple[dict[str, list[int]], Engine]:
    kv_cache = replace(started.kv_cache, num_blocks=NUM_BLOCKS + 1)
    config = EngineConfig(model=folder, max_num_batched_tokens=64, expected_tokens=1)
    engine = Engine(config, replace(started, kv_cache=kv_cache), clock=lambda: 100.0)
    requests = []
    for number, (length, asked) in enumerate(REQUESTS):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **asked)
        prompt = [(number * 31 + place * 7) % 500 for place in range(length)]
        requests.append(
            GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, arrival_s=100.0)
        )
    return serve(engine, requests), engine


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_late_copies_change_no_token_and_only_events_are_waited_for(
    on_cpu: Started, folder: Path, device: LateDevice, graphs: bool
) -> None:
    started = on_late_device(on_cpu, folder, graphs=graphs)
    num_waits = device.num_waits
    late, engine = tokens_of(started, folder)
    assert device.num_waits == num_waits
    assert engine.stats().preemptions["swap"] > 0
    assert late == tokens_of(on_cpu, folder)[0]


def sums(count: int = 3) -> list[int]:
    """Arrays that reach the device as a step's do, and a sum that comes back as its tokens do."""
    arrays = [np.arange(4, dtype=np.int32) + place for place in range(count)]
    first, *others = (to_device(each, CUDA) for each in arrays)
    for each in (*others, *tables_to_device(arrays, CUDA)):
        first = first + each
    return HostCopy([first]).wait()[0].tolist()


def test_what_is_read_early_or_ordered_by_nothing_is_found(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sums()
    assert right == [6, 12, 18, 24]
    with monkeypatch.context() as patch:
        patch.setattr(Event, "synchronize", lambda _: None)
        assert sums() == [POISONED] * 4
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "wait_stream", lambda *_: None)
        with pytest.raises(OrderError, match="does not wait for the work on another one"):
            sums()
    assert sums() == right


def test_pinned_memory_that_is_written_again_too_early_is_found(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = torch.empty(4, dtype=torch.int32, pin_memory=True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: shared.copy_(tensor))  # noqa: PLW0108 - a method
    assert sums(count=1) == [0, 2, 4, 6]
    with pytest.raises(OrderError, match="in to_device"):
        sums(count=2)


def test_memory_that_is_freed_while_the_side_stream_reads_it_is_found(device: LateDevice) -> None:
    early, late = (HostCopy([to_device(np.arange(4), CUDA)]) for _ in range(2))
    del early._packed
    assert early.wait()[0].tolist() == [POISONED] * 4
    assert late.wait()[0].tolist() == [0, 1, 2, 3]


def test_blocks_that_are_swapped_out_and_in_again_are_copied_in_the_order_of_the_stream(device: LateDevice) -> None:
    cache = torch.arange(32.0, device=CUDA).view(8, 4)
    swapped = SwappedBlocks([cache], num_blocks=2)
    for source, target in ((1, 5), (2, 6)):  # the second overwrites the same rows before the host has seen the first
        swapped.swap_out([BlockCopy(source, 0)])
        swapped.swap_in([BlockCopy(0, target)])
    assert device.num_waits == 0
    assert cache.tolist()[5:7] == [[4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]


def test_copies_that_keep_the_host_waiting_are_counted(device: LateDevice) -> None:
    there = torch.zeros(4, device=CUDA)
    waiting = (
        there.tolist,
        there[0].item,
        lambda: bool(there.sum() > 0),
        lambda: torch.tensor([1, 2], device=CUDA),
        lambda: there.copy_(torch.ones(4), non_blocking=True),  # not pinned
        lambda: to_device(np.zeros(4), CUDA).cpu(),
    )
    for number, waits in enumerate(waiting, 1):
        waits()
        assert device.num_waits == number
    for waits in (there.nonzero, lambda: there[there > 0], lambda: there[[0, 1]]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            waits()
