"""A tile's vector code computes what is written out here, whatever the shape of the heads."""

from typing import Any

import numpy as np
import pytest
import torch

from llmservice_server.backend.cpu.compiled import compiled
from llmservice_server.backend.cpu.element import as_array
from llmservice_server.backend.cpu.tile import LOWEST, add_tile, constants_of, multiply_tile, sum_tile

pytestmark = pytest.mark.slow

shapes = pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 96), (8, 128), (4, 6), (2, 3)])


@compiled()
def _score(queries: Any, keys: Any, parts: Any, scores: Any, highest: Any, constants: Any) -> None:
    multiply_tile(queries, keys, keys, parts, constants)
    sum_tile(parts, len(keys), scores, highest, constants)


@compiled()
def _add(weights: Any, values: Any, sums: Any, constants: Any) -> None:
    add_tile(weights, values, values, sums, constants)


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_and_weighted_sums(group: int, head_dim: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    constants = constants_of(group, head_dim)
    lanes = constants.dtype["lanes"].shape[0]
    assert head_dim % lanes == 0
    for num_keys in {1, lanes // 2 + 1, lanes}:
        queries = torch.randn(group, head_dim, generator=random)
        keys, values = (torch.randn(num_keys, head_dim, generator=random).to(dtype) for _ in range(2))
        parts, scores = np.full((group, lanes, lanes), np.nan, np.float32), np.zeros((group, lanes), np.float32)
        highest = np.empty(group, np.float32)
        _score(queries.numpy(), as_array(keys), parts, scores, highest, constants)
        torch.testing.assert_close(torch.from_numpy(scores)[:, :num_keys], queries @ keys.float().T)
        assert (scores[:, num_keys:] == np.float32(LOWEST)).all()
        assert (highest == scores.max(axis=1)).all()

        sums = torch.randn(group, head_dim, generator=random)
        expected = sums + torch.from_numpy(scores)[:, :num_keys] @ values.float()
        _add(scores, as_array(values), sums.numpy(), constants)
        torch.testing.assert_close(sums, expected)
