"""A workload chooses the settings that the user leaves open, by arithmetic, and names its reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.budget import Budget
from llmservice_planner.sizing.gpu import CPU, find_gpu
from llmservice_planner.sizing.plan import SizingError, SizingRequest, plan
from llmservice_planner.sizing.workload import READING_S, WORKLOADS, Workload, for_workload

LLAMA3_8B = ModelShape(
    layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=32768,
)
ENCODER = replace(
    LLAMA3_8B,
    architecture="bert",
    layers=12,
    hidden_size=768,
    intermediate_size=3072,
    heads=12,
    kv_heads=12,
    head_dim=64,
    vocab_size=30522,
    max_position_embeddings=512,
    encoder_parameters=109_482_240,
)


def request(gpu: str, shape: ModelShape = LLAMA3_8B, **fields: Any) -> SizingRequest:
    return SizingRequest(shape=shape, device=find_gpu(gpu), **fields)


@pytest.mark.parametrize(
    ("workload", "gpu", "fields", "chosen"),
    [
        ("chat", "h100-80gb", {}, {"expected_tokens": 1536, "max_num_batched_tokens": 4416}),
        ("chat", "l4", {"max_model_len": 8192}, {"expected_tokens": 1536, "max_num_batched_tokens": 576}),
        ("chat", "l4", {"max_model_len": 1024}, {"expected_tokens": 1024}),
        ("chat", "l4", {"max_model_len": 8192, "itl_p99_s": 0.2}, {"max_num_batched_tokens": None}),
        ("longContext", "h100-80gb", {}, {"expected_tokens": 16384, "least_sequence_tokens": 4096}),
        ("batch", "l40s", {}, {"expected_tokens": None, "least_sequence_tokens": 384, "bounded_by_ridge": False}),
        ("batch", "l40s", {"itl_p99_s": 0.1}, {"bounded_by_ridge": True}),
        ("embeddings", "h100-80gb", {"shape": ENCODER}, {"expected_tokens": 512}),
    ],
)
def test_settings_of_a_workload(workload: Workload, gpu: str, fields: dict[str, Any], chosen: dict[str, Any]) -> None:
    found = for_workload(request(gpu, **fields), workload)
    assert {name: getattr(found, name) for name in chosen} == chosen


@pytest.mark.parametrize("workload", WORKLOADS)
def test_explicit_fields_win(workload: Workload) -> None:
    shape = ENCODER if workload == "embeddings" else LLAMA3_8B
    given = request("l40s", shape, expected_tokens=300, max_num_batched_tokens=1000, max_num_seqs=7)
    found = for_workload(given, workload)
    assert (found.expected_tokens, found.max_num_batched_tokens, found.max_num_seqs) == (300, 1000, 7)
    assert plan(found).max_num_seqs == 7


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("gpu", ["l4", "l40s", "h100-80gb", None])
def test_every_setting_has_its_reason_and_the_model_still_fits(workload: Workload, gpu: str | None) -> None:
    shape = ENCODER if workload == "embeddings" else LLAMA3_8B
    device = find_gpu(gpu) if gpu else CPU(32 * 2**30)
    before = SizingRequest(shape=shape, device=device, max_model_len=512 if shape.is_encoder else 8192)
    after = for_workload(before, workload)
    names = ("expected_tokens", "max_num_batched_tokens", "least_sequence_tokens", "bounded_by_ridge")
    changed = [name for name in names if getattr(after, name) != getattr(before, name)]
    assert len(after.notes) == len(changed)
    assert all(note.startswith(f"workload: {workload}, ") for note in after.notes)
    answer = plan(after)
    assert answer.fits
    assert answer.explanation[: len(after.notes)] == after.notes


def test_chats_steps_take_no_longer_than_half_of_reading() -> None:
    found = for_workload(request("l40s", max_model_len=8192), "chat")
    latency = Budget.of(found).latency
    assert latency is not None
    assert found.max_num_batched_tokens is not None
    assert latency.prefill_s(found.max_num_batched_tokens) <= READING_S
    assert latency.prefill_s(found.max_num_batched_tokens + 64) > READING_S


def test_batch_runs_more_sequences_than_the_ridge_and_chat_does_not() -> None:
    fields = {"max_model_len": 1024, "expected_tokens": 256}
    chat, batch = (plan(for_workload(request("h100-80gb", **fields), each)) for each in ("chat", "batch"))  # type: ignore[arg-type]
    assert chat.limited_by == "ridge"
    assert batch.max_num_seqs > chat.max_num_seqs


def test_long_context_reserves_no_logits_for_sequences_that_cannot_fit() -> None:
    before = request("l4", max_model_len=16384)
    plain, long = plan(before), plan(for_workload(before, "longContext"))
    assert long.max_num_seqs < plain.max_num_seqs
    assert long.kv_pool_bytes > plain.kv_pool_bytes


@pytest.mark.parametrize(
    ("workload", "shape", "complaint"),
    [
        ("embeddings", LLAMA3_8B, "workload embeddings is for an encoder, and the model is llama"),
        ("chat", ENCODER, "workload chat is for a model that generates: use embeddings for an encoder"),
    ],
)
def test_workload_of_another_kind_of_model_is_refused(workload: Workload, shape: ModelShape, complaint: str) -> None:
    with pytest.raises(SizingError, match=complaint):
        for_workload(request("l4", shape), workload)


def test_without_a_workload_nothing_changes() -> None:
    assert for_workload(request("l4"), None) == request("l4")
