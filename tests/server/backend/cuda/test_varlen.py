"""Chunks by `varlen_attn`: everything but torch's kernel itself, which runs on a card only and has never run here.

Its place is taken by attention written from what its documentation promises.
"""

import importlib
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.never_waiting import META, never_waiting
from llmservice_server.backend.agreement import BOUNDS, Case, relative_error
from llmservice_server.backend.base import KVCacheShape, StepInput
from llmservice_server.backend.cuda.attention import TritonAttention
from llmservice_server.backend.cuda.chunk_race import OURS, race_for_chunks
from llmservice_server.backend.cuda.step_tables import StepTables
from llmservice_server.backend.cuda.varlen import (
    Bounds,
    Varlen,
    VarlenChunks,
    VarlenTables,
    by_torch,
    why_varlen_cannot_serve,
)

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SHAPE = KVCacheShape(4, 2, 64, (None, 20), 16, torch.bfloat16)
SMALL = KVCacheShape(2, 1, 16, (None, 20), 16, torch.bfloat16)


class Documented:
    """What `varlen_attn`'s documentation promises, one sequence after the other; counts how often it is asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds, window: int | None
    ) -> torch.Tensor:
        self.num_calls += 1
        query_bounds, key_bounds = bounds.queries.tolist(), bounds.keys.tolist()
        assert (len(query), len(key), len(value)) == (query_bounds[-1], key_bounds[-1], key_bounds[-1])
        assert (bounds.most_queries, bounds.most_keys) == (max(np.diff(query_bounds)), max(np.diff(key_bounds)))
        answers = []
        for number in range(len(query_bounds) - 1):
            queries = query[query_bounds[number] : query_bounds[number + 1]].transpose(0, 1)
            keys, values = (each[key_bounds[number] : key_bounds[number + 1]].transpose(0, 1) for each in (key, value))
            mask = visible(queries.shape[1], keys.shape[1], window)
            answers.append(
                torch.nn.functional.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
            )
        return torch.cat(answers, dim=1).transpose(0, 1)


def visible(num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
    own = torch.arange(num_keys - num_queries, num_keys)[:, None]
    keys = torch.arange(num_keys)
    mask = keys <= own
    return mask if window is None else mask & (keys > own - window)


def off_by(shape: KVCacheShape, dtype: torch.dtype, spans: tuple[tuple[int, int], ...], most_keys: int = 1000) -> float:
    attend = Documented()

    def backend(shape: KVCacheShape, num_blocks: int, device: torch.device) -> TritonAttention:
        return TritonAttention(shape, num_blocks, device, Varlen(attend, most_keys))

    error = relative_error(Case(shape, dtype, spans), backend, CPU)
    assert (attend.num_calls > 0) == (most_keys > 0)
    return error


@pytest.mark.parametrize(("heads", "block_size"), [((4, 2, 64), 16), ((3, 1, 96), 64), ((2, 2, 128), 256)])
def test_chunks_by_varlen_agree_with_torch(heads: tuple[int, int, int], block_size: int) -> None:
    shape = KVCacheShape(*heads, (None, 20), block_size, torch.float32)
    assert off_by(shape, torch.float32, ((0, 19), (17, 2), (33, 1))) < BOUNDS[torch.float32]


@pytest.mark.parametrize("spans", [((0, 37),), ((33, 2), (5, 1))])
def test_alone_beside_single_tokens_and_after_cached_prefixes(spans: tuple[tuple[int, int], ...]) -> None:
    assert off_by(SHAPE, torch.bfloat16, spans) < BOUNDS[torch.bfloat16]


def test_steps_with_more_keys_than_it_was_given_room_for_go_to_our_kernel() -> None:
    tables = StepTables.of(StepInput.of([(20, 12, [1, 2]), (7, 1, [3])]), SHAPE.block_size)
    assert Varlen(Documented(), 32).chunks(tables, SHAPE, CPU) is not None
    assert Varlen(Documented(), 31).chunks(tables, SHAPE, CPU) is None
    assert off_by(SHAPE, torch.bfloat16, ((0, 19), (5, 1)), most_keys=0) < BOUNDS[torch.bfloat16]


def test_a_step_without_chunks_asks_nothing_of_it() -> None:
    tables = StepTables.of(StepInput.of([(7, 1, [3])]), SHAPE.block_size)
    assert Varlen(Documented(), 1000).chunks(tables, SHAPE, CPU) is None


def test_where_a_steps_keys_lie_in_the_cache() -> None:
    step = StepInput.of([(7, 1, [5]), (0, 2, [4]), (15, 3, [6, 2])])
    tables = VarlenTables.of(StepTables.of(step, 16), SHAPE)
    assert tables.query_bounds.tolist() == [0, 2, 5]
    assert tables.key_bounds.tolist() == [0, 2, 20]
    assert tables.query_rows.tolist() == [1, 2, 3, 4, 5]
    per_block = 2 * 2 * 16  # heads, keys and values, tokens
    expected = [4 * per_block + token for token in range(2)] + [6 * per_block + token for token in range(16)]
    assert tables.key_rows.tolist() == [*expected, 2 * per_block, 2 * per_block + 1]
    assert (tables.longest_chunk, tables.longest_sequence) == (3, 18)
    assert tables.key_rows.dtype == np.int32


class Asked(TorchDispatchMode):
    """What torch's operator is asked for; it computes shapes only."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator is torch.ops.torch_attn._varlen_attn.default:
            self.args = args
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("window", "causal", "expected"), [(None, True, [-1, 0]), (20, False, [19, 0])])
def test_torchs_function_takes_what_it_is_given(window: int | None, causal: bool, expected: list[int]) -> None:
    """Its kernel is not run, but torch checks names and numbers of heads."""
    importlib.import_module("torch.nn.attention.varlen")  # here, as it takes seconds
    with FakeTensorMode(), Asked() as asked:
        cache = torch.empty(4, 2, 2, 16, 64, dtype=torch.bfloat16)
        query = torch.empty(8, 8, 64, dtype=torch.bfloat16)[:, :4]
        answer = torch.empty(8, 256, dtype=torch.bfloat16)
        bounds = Bounds(torch.empty(3, dtype=torch.int32), torch.empty(3, dtype=torch.int32), 5, 19)
        rows = torch.empty(2 * 24 * 2, dtype=torch.int32)
        chunks = VarlenChunks(by_torch, bounds, torch.empty(8, dtype=torch.int64), rows)
        chunks(query, cache, None, answer, window)
    assert [tuple(each.shape) for each in asked.args[:5]] == [(8, 4, 64), (24, 2, 64), (24, 2, 64), (3,), (3,)]
    assert asked.args[5:8] == (5, 19, causal)
    assert asked.args[9:11] in ((expected, True), (expected,))  # torch 2.11 does not ask whether heads are grouped


def test_a_torch_that_takes_grouped_heads_unasked_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_torch_2_11(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> torch.Tensor:
        assert (len(args), scale, window_size) == (7, None, (-1, 0))
        return args[0]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_torch_2_11)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    query, key = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    assert by_torch(query, key, key, Bounds(bounds, bounds, 3, 3), None) is query


def test_the_host_waits_for_nothing_on_the_way() -> None:
    tables = StepTables.of(StepInput.of([(0, 5, [1]), (16, 3, [2, 3])]), 16)
    query, cache, answer = (
        torch.empty(size, dtype=torch.bfloat16, device=META) for size in ((8, 4, 64), (4, 2, 2, 16, 64), (8, 256))
    )
    with never_waiting():
        chunks = Varlen(by_torch, 24).chunks(tables, SHAPE, META)
        assert chunks is not None
        chunks(query, cache, None, answer, None)


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        (SHAPE, torch.bfloat16, None),
        (KVCacheShape(4, 2, 64, (None,), 16, torch.float16), torch.float16, None),
        (KVCacheShape(4, 2, 64, (None,), 16, torch.float8_e4m3fn), torch.bfloat16, "fp8 cache"),
        (KVCacheShape(4, 2, 64, (None,), 16, torch.float32), torch.float32, "takes bfloat16 and float16"),
        (SHAPE, torch.float16, "takes bfloat16 and float16"),
    ],
)
def test_what_it_cannot_serve_is_told_before(shape: KVCacheShape, dtype: torch.dtype, why: str | None) -> None:
    problem = why_varlen_cannot_serve(shape, dtype)
    assert problem is None if why is None else why in str(problem)


def test_both_ways_are_checked_and_timed_on_a_chunk_after_as_many_cached_tokens() -> None:
    attend = Documented()
    verdict = race_for_chunks(SMALL, torch.bfloat16, CPU, 8, attend)
    assert re.fullmatch(r"triton [\d.e+]+ ms, varlen_attn [\d.e+]+ ms", verdict.reason)
    assert attend.num_calls == 2 * 2 + 7  # both windows' layers are compared, in two steps; one layer is timed


def test_answers_that_are_wrong_are_not_timed() -> None:
    def wrong(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds, window: int | None
    ) -> torch.Tensor:
        return Documented()(query, key, value, bounds, None)  # forgets the window

    verdict = race_for_chunks(SMALL, torch.bfloat16, CPU, 8, wrong)
    assert verdict.name == OURS
    assert "varlen_attn is unusable: its answers are off by" in verdict.reason


def test_where_torchs_kernel_is_missing_chunks_stay_with_ours() -> None:
    verdict = race_for_chunks(SMALL, torch.bfloat16, CPU, 8)
    assert verdict.name == OURS
    assert re.match(r"triton [\d.e+]+ ms, varlen_attn is unusable: NotImplementedError", verdict.reason)
