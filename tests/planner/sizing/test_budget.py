"""Properties of the memory arithmetic that hold for any model on any GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.budget import Budget
from llmservice_planner.sizing.gpu import CPU, GIB, GPU, find_gpu
from llmservice_planner.sizing.plan import SizingRequest, plan

ShapeOf = Callable[[str], ModelShape]


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Small models of any layout that memory depends on: grouped heads, windows in some layers, latents."""
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    layers = draw(st.integers(1, 48))
    sliding = draw(st.integers(0, layers))
    latent = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    return ModelShape(
        layers=layers,
        hidden_size=draw(st.sampled_from([256, 1024, 4096])),
        intermediate_size=draw(st.integers(64, 16384)),
        heads=8 * kv_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([32, 64, 128, 256])),
        vocab_size=draw(st.integers(256, 200_000)),
        max_position_embeddings=131_072,
        sliding_window=draw(st.integers(1, 8192)) if sliding else None,
        sliding_layers=sliding,
        **(latent if draw(st.booleans()) else {}),
    )


@st.composite
def requests(draw: st.DrawFn) -> SizingRequest:
    """Requests on one to eight GPUs or a CPU, with too little to ample memory."""
    memory = draw(st.integers(GIB // 2, 200 * GIB))
    on_cpu = draw(st.booleans())
    length = draw(st.integers(1, 65536))
    return SizingRequest(
        shape=draw(shapes()),
        device=CPU(memory) if on_cpu else GPU("test-gpu", memory, 2e12, 3e14),
        device_count=1 if on_cpu else draw(st.sampled_from([1, 2, 4, 8])),
        max_model_len=length,
        kv_dtype=draw(st.sampled_from(["auto", "fp8", "float32"])),
        block_size=draw(st.sampled_from([1, 8, 16, 32])),
        gpu_memory_utilization=draw(st.sampled_from([0.5, 0.9, 1.0])),
        max_num_batched_tokens=draw(st.integers(1, 8192)),
        expected_tokens=draw(st.integers(1, length)),
        max_num_seqs=draw(st.none() | st.just(1)),
    )


@given(requests())
def test_what_is_planned_fits_into_what_there_is(request: SizingRequest) -> None:
    answer = plan(request)
    spent = answer.weights_bytes + answer.overhead_bytes + answer.kv_pool_bytes
    usable = request.device_count * int(request.device.memory_bytes * request.gpu_memory_utilization)
    if answer.fits:
        assert spent == usable
        blocks_needed = math.ceil(request.model_len / request.block_size)
        if request.shape.sliding_window is None:
            assert answer.num_blocks - 1 >= blocks_needed
    assert answer.num_blocks * Budget.of(request).block_bytes <= answer.kv_pool_bytes


@given(requests())
def test_guaranteed_sequences_never_need_more_blocks_than_there_are(request: SizingRequest) -> None:
    answer = plan(replace(request, max_num_seqs=None))
    blocks_each = Budget.of(request).groups.blocks(request.model_len)
    assert answer.guaranteed_sequences * blocks_each <= max(0, answer.num_blocks - 1)
    assert answer.guaranteed_sequences >= 1 or not answer.fits


@given(requests(), st.integers(1, 64 * GIB))
def test_more_memory_never_holds_less(request: SizingRequest, more: int) -> None:
    larger = replace(request, device=replace(request.device, memory_bytes=request.device.memory_bytes + more))
    before, after = plan(request), plan(larger)
    assert after.fits >= before.fits
    assert after.max_num_seqs >= before.max_num_seqs
    assert after.shortfall_bytes <= before.shortfall_bytes


@given(requests(), st.integers(1, 65536))
def test_longer_sequences_never_hold_more_of_them(request: SizingRequest, longer: int) -> None:
    before = Budget.of(request)
    after = Budget.of(replace(request, max_model_len=request.model_len + longer))
    assert after.fits <= before.fits
    assert after.sequences(request.model_len + longer, 1) <= before.sequences(request.model_len, 1)


@given(requests())
def test_the_shortfall_is_exactly_what_is_missing(request: SizingRequest) -> None:
    at_full_share = replace(request, gpu_memory_utilization=1.0, device_count=1)
    missing = Budget.of(at_full_share).shortfall_bytes
    device = at_full_share.device

    def fits_with(memory_bytes: int) -> bool:
        return Budget.of(replace(at_full_share, device=replace(device, memory_bytes=memory_bytes))).fits

    assert fits_with(device.memory_bytes + missing)
    if missing:
        assert not fits_with(device.memory_bytes + missing - 1)


@pytest.mark.parametrize(
    ("model", "tokens", "blocks"),
    [
        ("llama-3-8b", 8192, 512),
        ("llama-3-8b", 8193, 513),
        ("mistral-7b", 4096, 256),  # not yet past the window
        ("mistral-7b", 32768, math.ceil((4095 + 2048) / 16) + 1),  # the window and a step in flight
        ("gemma-2-9b", 8192, 512 + 385),  # half of the layers slide: two groups
        ("gemma-3-1b", 32768, 2048 + 6 * 161),  # 4 layers see all, 22 slide: groups of 4
    ],
)
def test_blocks_of_a_sequence(shape_of: ShapeOf, model: str, tokens: int, blocks: int) -> None:
    shape = replace(shape_of(model), max_position_embeddings=None)
    request = SizingRequest(shape=shape, device=find_gpu("h100"), max_model_len=tokens, max_num_batched_tokens=2048)
    assert Budget.of(request).groups.blocks(tokens) == blocks
