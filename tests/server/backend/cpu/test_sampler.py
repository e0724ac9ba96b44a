"""The top-k/top-p mask agrees with its definition, computed token by token with NumPy."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_server.backend.cpu import sampler as cpu_sampler
from llmservice_server.backend.sampling_batch import SamplingBatch, stream_states, uniforms

Weights = npt.NDArray[np.float32]


def kept_by_definition(weights: Weights, by_mass: bool, wanted: float) -> list[int]:
    """Sorted by weight, stable: a token is kept if those before it sum to less than `wanted`."""
    kept, amount = [], 0.0
    for token in np.argsort(-weights, kind="stable").tolist():
        if weights[token] > 0 and (amount < wanted or not kept):
            kept.append(token)
            amount += float(weights[token]) if by_mass else 1.0
    return sorted(kept)


def kept_by_kernel(weights: Weights, by_mass: bool, wanted: float, floor: float = 0.0) -> list[int]:
    ids = np.empty(len(weights) + 1, np.int32)
    count = cpu_sampler._gather(weights, np.float32(floor), ids)
    count = cpu_sampler._top_k_top_p(weights, ids, count, by_mass, wanted)
    return ids[:count].tolist()


whole = st.integers(0, 64).map(lambda number: number / 64)  # sums of these are exact, in any order


@given(
    weights=st.lists(whole, min_size=1, max_size=60).filter(any),
    by_mass=st.booleans(),
    share=st.floats(0.001, 1.2),
)
@settings(deadline=None)
def test_kept_tokens_with_ties_agree_with_the_definition(weights: list[float], by_mass: bool, share: float) -> None:
    row = np.array(weights, np.float32)
    wanted = share * float(row.sum()) if by_mass else float(max(1, round(share * len(row))))
    assert kept_by_kernel(row, by_mass, wanted) == kept_by_definition(row, by_mass, wanted)


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_agrees_with_the_definition(spread: float, share: float) -> None:
    logits = np.random.default_rng(0).normal(0, spread, 32_000)
    row = np.exp(logits - logits.max()).astype(np.float32)
    wanted = share * float(row.sum(dtype=np.float64))
    floor = (1 - share) * float(row.sum(dtype=np.float64)) / len(row) * 0.999
    assert kept_by_kernel(row, True, wanted, floor) == kept_by_definition(row, True, wanted)


@pytest.mark.parametrize("top_k", [1, 50, 511, 2000])
def test_no_token_of_the_top_k_is_below_the_floor(top_k: int) -> None:
    row = np.random.default_rng(1).random(32_000).astype(np.float32)
    floor = cpu_sampler._floor_of_top_k(row, top_k)
    assert kept_by_kernel(row, False, top_k, floor) == kept_by_definition(row, False, top_k)


def test_argmax_is_the_first_of_the_largest_and_minus_one_without_a_finite_maximum() -> None:
    def argmax(values: list[float]) -> int:
        place: int = cpu_sampler._argmax(np.array(values, np.float32).view(np.int32))
        return place

    inf, nan = float("inf"), float("nan")
    assert argmax([-2.0, -0.5, -0.5, -inf]) == 1
    assert argmax([0.0, 3.5, 3.5]) == 1
    assert [argmax(row) for row in ([1.0, nan], [1.0, -nan], [1.0, inf], [-inf, -inf])] == [-1] * 4


def test_a_row_is_sampled_by_the_number_of_its_seed_and_position() -> None:
    seeds, places, vocab_size = [0, 7, -1, 2**63 + 5], [0, 3, 1000, 5], 1 << 16
    streams = stream_states(seeds)
    identical = SamplingBatch.identical(len(seeds), temperature=1.0)
    batch = replace(identical, streams=streams, token_ids=[[0] * place for place in places])
    token_ids = cpu_sampler.choose(torch.zeros(len(seeds), vocab_size), batch)
    numbers = uniforms(streams, np.array(places, np.int64))
    assert token_ids.tolist() == (numbers * vocab_size).astype(np.int64).tolist()
