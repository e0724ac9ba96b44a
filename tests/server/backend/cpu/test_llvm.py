"""Conversions agree with torch, vector reductions and 2^x with NumPy."""

from typing import Any

import numpy as np
import pytest
import torch

from llmservice_server.backend.cpu.compiled import compiled
from llmservice_server.backend.cpu.llvm import as_array, convert, exp, exp2, from_float32, pair, to_float32

pytestmark = pytest.mark.slow

HALF = [torch.bfloat16, torch.float16]


@compiled()
def to_float32_all(elements: Any, numbers: Any) -> None:
    for index in range(len(elements)):
        numbers[index] = to_float32(elements[index])


@compiled()
def from_float32_all(numbers: Any, elements: Any) -> None:
    for index in range(len(numbers)):
        elements[index] = from_float32(numbers[index], elements[index])


@compiled()
def exp_all(values: Any) -> None:
    for index in range(len(values)):
        values[index] = exp(values[index])


@compiled()
def exp2_all(values: Any) -> None:
    for index in range(len(values)):
        values[index] = exp2(values[index])


@compiled()
def convert_all(elements: Any, others: Any) -> None:
    for index in range(len(elements)):
        others[index] = convert(elements[index], others[index])


@compiled()
def pair_all(first: Any, second: Any, pairs: Any) -> None:
    for index in range(len(pairs)):
        pairs[index] = pair(first[index], second[index], pairs[index])


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values, NaN and infinity included."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_to_float32_is_exact_for_all_values(dtype: torch.dtype) -> None:
    numbers = torch.empty(1 << 16)
    to_float32_all(as_array(all_values(dtype)), numbers.numpy())
    torch.testing.assert_close(numbers, all_values(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_from_float32_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    exact = all_values(torch.float16 if dtype == torch.float16 else torch.bfloat16).float()
    exact = exact[exact.isfinite()].sort().values
    between = (exact[1:] / 2 + exact[:-1] / 2) if dtype != torch.float32 else exact
    hidden_nan = torch.tensor([0x7F800001], dtype=torch.int32).view(
        torch.float32
    )  # truncation to bfloat16 would make it infinite
    numbers = torch.cat((exact, between, torch.randn(1000), torch.tensor([torch.inf, -torch.inf, 3.4e38]), hidden_nan))
    elements = torch.empty(len(numbers), dtype=dtype)
    from_float32_all(numbers.numpy(), as_array(elements))
    torch.testing.assert_close(elements, numbers.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_exp_agrees_with_numpy_clamps_and_keeps_nan() -> None:
    values = np.linspace(-80, 80, 100_001, dtype=np.float32)
    computed = values.copy()
    exp_all(computed)
    np.testing.assert_allclose(computed, np.exp(values.astype(np.float64)), rtol=5e-6)
    beyond = np.array([-np.inf, -1000, 1000, np.inf, np.nan], np.float32)
    exp_all(beyond)
    assert (beyond[:2] < 1e-37).all()
    assert (beyond[2:4] > 1e37).all()
    assert np.isnan(beyond[4])


def test_exp2_agrees_with_numpy() -> None:
    values = np.linspace(-125, 126, 100_001, dtype=np.float32)
    computed = values.copy()
    exp2_all(computed)
    np.testing.assert_allclose(computed, np.exp2(values.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("source", [torch.float32, *HALF])
@pytest.mark.parametrize("target", [torch.float32, *HALF])
def test_convert_agrees_with_torch(source: torch.dtype, target: torch.dtype) -> None:
    values = torch.randn(1000).to(source)
    others = torch.empty(1000, dtype=target)
    convert_all(as_array(values), as_array(others))
    assert torch.equal(others, values.to(target))


def test_pair_is_two_bfloat16_or_one_float32() -> None:
    first, second = (torch.randn(100) for _ in range(2))
    single = np.empty(100, np.float32)
    pair_all(first.numpy(), second.numpy(), single)
    np.testing.assert_array_equal(single, first.numpy())
    first, second = first.bfloat16(), second.bfloat16()
    pairs = np.empty(100, np.int32)
    pair_all(as_array(first), as_array(second), pairs)
    side_by_side = torch.stack((first, second), dim=1).view(torch.int32).flatten()
    np.testing.assert_array_equal(pairs, side_by_side.numpy())
