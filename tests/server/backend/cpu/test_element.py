"""What kernels make of an element is what torch makes of it."""

from typing import Any

import numpy as np
import pytest
import torch

from llmservice_server.backend.cpu.compiled import compiled
from llmservice_server.backend.cpu.element import as_array, converted, exp, joined, narrowed, widened

pytestmark = pytest.mark.slow

NARROW = [torch.bfloat16, torch.float16]


@compiled()
def widen_all(elements: Any, wide: Any) -> None:
    for index in range(len(elements)):
        wide[index] = widened(elements[index])


@compiled()
def narrow_all(wide: Any, elements: Any) -> None:
    for index in range(len(wide)):
        elements[index] = narrowed(wide[index], elements[index])


@compiled()
def exp_all(values: Any) -> None:
    for index in range(len(values)):
        values[index] = exp(values[index])


@compiled()
def convert_all(elements: Any, others: Any) -> None:
    for index in range(len(elements)):
        others[index] = converted(elements[index], others[index])


@compiled()
def join_all(first: Any, second: Any, lanes: Any) -> None:
    for index in range(len(lanes)):
        lanes[index] = joined(first[index], second[index], lanes[index])


def every(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values, NaN and infinity included."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_every_narrow_value_widens_exactly(dtype: torch.dtype) -> None:
    wide = torch.empty(1 << 16)
    widen_all(as_array(every(dtype)), wide.numpy())
    torch.testing.assert_close(wide, every(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_a_wide_value_rounds_to_the_nearest_and_to_even_between_two(dtype: torch.dtype) -> None:
    exact = every(torch.float16 if dtype == torch.float16 else torch.bfloat16).float()
    exact = exact[exact.isfinite()].sort().values
    between = (exact[1:] / 2 + exact[:-1] / 2) if dtype != torch.float32 else exact
    hidden_nan = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # all its bits are below bfloat16's
    wide = torch.cat((exact, between, torch.randn(1000), torch.tensor([torch.inf, -torch.inf, 3.4e38]), hidden_nan))
    elements = torch.empty(len(wide), dtype=dtype)
    narrow_all(wide.numpy(), as_array(elements))
    torch.testing.assert_close(elements, wide.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_exp_is_right_where_weights_and_gates_need_it_and_keeps_nan() -> None:
    values = np.linspace(-80, 80, 100_001, dtype=np.float32)
    computed = values.copy()
    exp_all(computed)
    np.testing.assert_allclose(computed, np.exp(values.astype(np.float64)), rtol=5e-6)
    beyond = np.array([-np.inf, -1000, 1000, np.inf, np.nan], np.float32)
    exp_all(beyond)
    assert (beyond[:2] < 1e-37).all()
    assert (beyond[2:4] > 1e37).all()
    assert np.isnan(beyond[4])


@pytest.mark.parametrize("source", [torch.float32, *NARROW])
@pytest.mark.parametrize("target", [torch.float32, *NARROW])
def test_an_element_becomes_one_of_another_kind_as_torch_would_have_it(
    source: torch.dtype, target: torch.dtype
) -> None:
    values = torch.randn(1000).to(source)
    others = torch.empty(1000, dtype=target)
    convert_all(as_array(values), as_array(others))
    assert torch.equal(others, values.to(target))


def test_a_lane_has_two_bfloat16_side_by_side_or_one_float32() -> None:
    first, second = (torch.randn(100) for _ in range(2))
    lanes = np.empty(100, np.float32)
    join_all(first.numpy(), second.numpy(), lanes)
    np.testing.assert_array_equal(lanes, first.numpy())
    first, second = first.bfloat16(), second.bfloat16()
    pairs = np.empty(100, np.int32)
    join_all(as_array(first), as_array(second), pairs)
    side_by_side = torch.stack((first, second), dim=1).view(torch.int32).flatten()
    np.testing.assert_array_equal(pairs, side_by_side.numpy())
