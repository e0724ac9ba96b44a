"""Chunks by `varlen_attn`, without torch's kernel, which needs a GPU.

A double replaces it, written from its documentation.
"""

import importlib
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.gpu.late_device import CUDA, late_device
from llmservice_server.backend.agreement import BOUNDS, Case, relative_error
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda.attention import StepTables, TritonAttention
from llmservice_server.backend.cuda.varlen import (
    OURS,
    TORCH_VARLEN,
    Bounds,
    Varlen,
    VarlenChunks,
    by_torch,
    choose_chunk_attention,
    fastest,
    why_varlen_cannot_serve,
)
from llmservice_server.backend.step_input import StepInput

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SHAPE = KVCacheShape(4, 2, 64, (None, 20), 16, torch.bfloat16)
SMALL = KVCacheShape(2, 1, 16, (None, 20), 16, torch.bfloat16)


class Documented:
    """What `varlen_attn`'s documentation specifies, for each sequence; counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds, window: int | None
    ) -> torch.Tensor:
        self.num_calls += 1
        query_bounds, key_bounds = bounds.queries.tolist(), bounds.keys.tolist()
        assert (len(query), len(key), len(value)) == (query_bounds[-1], key_bounds[-1], key_bounds[-1])
        assert (bounds.max_queries, bounds.max_keys) == (max(np.diff(query_bounds)), max(np.diff(key_bounds)))
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


def error_of(
    shape: KVCacheShape, dtype: torch.dtype, spans: tuple[tuple[int, int], ...], max_keys: int = 1000
) -> float:
    attend = Documented()

    def backend(shape: KVCacheShape, num_blocks: int, device: torch.device) -> TritonAttention:
        return TritonAttention(shape, num_blocks, device, Varlen(attend, max_keys))

    error = relative_error(Case(shape, dtype, spans), backend, CPU)
    assert (attend.num_calls > 0) == (max_keys > 0)
    return error


@pytest.mark.parametrize(("heads", "block_size"), [((4, 2, 64), 16), ((3, 1, 96), 64), ((2, 2, 128), 256)])
def test_chunks_by_varlen_agree_with_torch(heads: tuple[int, int, int], block_size: int) -> None:
    shape = KVCacheShape(*heads, (None, 20), block_size, torch.float32)
    assert error_of(shape, torch.float32, ((0, 19), (17, 2), (33, 1))) < BOUNDS[torch.float32]


@pytest.mark.parametrize("spans", [((0, 37),), ((33, 2), (5, 1))])
def test_chunks_alone_with_decodes_and_after_cached_prefixes_agree_with_torch(
    spans: tuple[tuple[int, int], ...],
) -> None:
    assert error_of(SHAPE, torch.bfloat16, spans) < BOUNDS[torch.bfloat16]


def test_steps_with_more_than_max_keys_are_computed_by_our_kernel() -> None:
    tables = StepTables.of(StepInput.of([(20, 12, [1, 2]), (7, 1, [3])]), SHAPE.block_size)
    assert Varlen(Documented(), 32).chunks(tables, SHAPE, CPU) is not None
    assert Varlen(Documented(), 31).chunks(tables, SHAPE, CPU) is None
    assert error_of(SHAPE, torch.bfloat16, ((0, 19), (5, 1)), max_keys=0) < BOUNDS[torch.bfloat16]


def test_a_step_without_chunks_does_not_use_it() -> None:
    tables = StepTables.of(StepInput.of([(7, 1, [3])]), SHAPE.block_size)
    assert Varlen(Documented(), 1000).chunks(tables, SHAPE, CPU) is None


def test_key_rows_in_the_cache() -> None:
    step = StepInput.of([(7, 1, [5]), (0, 2, [4]), (15, 3, [6, 2])])
    chunks = VarlenChunks.of(by_torch, StepTables.of(step, 16), SHAPE, CPU)
    assert chunks.bounds.queries.tolist() == [0, 2, 5]
    assert chunks.bounds.keys.tolist() == [0, 2, 20]
    assert chunks.query_rows.tolist() == [1, 2, 3, 4, 5]
    per_block = 2 * 2 * 16  # heads, keys and values, tokens
    expected = [4 * per_block + token for token in range(2)] + [6 * per_block + token for token in range(16)]
    first_keys = [*expected, 2 * per_block, 2 * per_block + 1]
    rows = [[row + kind * 16 + head * 32 for row in first_keys for head in range(2)] for kind in range(2)]
    assert chunks.rows.tolist() == rows[0] + rows[1]
    assert (chunks.bounds.max_queries, chunks.bounds.max_keys) == (3, 18)
    assert chunks.rows.dtype == torch.int32


class Recorded(TorchDispatchMode):
    """The arguments of torch's operator, which computes shapes only."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator is torch.ops.torch_attn._varlen_attn.default:
            self.args = args
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("window", "causal", "expected"), [(None, True, [-1, 0]), (20, False, [19, 0])])
def test_torch_accepts_the_arguments(window: int | None, causal: bool, expected: list[int]) -> None:
    """Its kernel is not run, but torch checks names and numbers of heads."""
    importlib.import_module("torch.nn.attention.varlen")  # here, because it takes seconds
    with FakeTensorMode(), Recorded() as recorded:
        cache = torch.empty(4, 2, 2, 16, 64, dtype=torch.bfloat16)
        query = torch.empty(8, 8, 64, dtype=torch.bfloat16)[:, :4]
        output = torch.empty(8, 256, dtype=torch.bfloat16)
        bounds = Bounds(torch.empty(3, dtype=torch.int32), torch.empty(3, dtype=torch.int32), 5, 19)
        rows = torch.empty(2 * 24 * 2, dtype=torch.int32)
        chunks = VarlenChunks(by_torch, bounds, torch.empty(8, dtype=torch.int64), rows)
        chunks(query, cache, None, output, window)
    assert [tuple(each.shape) for each in recorded.args[:5]] == [(8, 4, 64), (24, 2, 64), (24, 2, 64), (3,), (3,)]
    assert recorded.args[5:8] == (5, 19, causal)
    assert recorded.args[9:11] in ((expected, True), (expected,))  # torch 2.11 has no option for grouped heads


def test_a_torch_without_the_option_for_grouped_heads_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_torch_2_11(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> torch.Tensor:
        assert (len(args), scale, window_size) == (7, None, (-1, 0))
        return args[0]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_torch_2_11)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    query, key = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    assert by_torch(query, key, key, Bounds(bounds, bounds, 3, 3), None) is query


def test_the_host_never_waits_for_the_device() -> None:
    tables = StepTables.of(StepInput.of([(0, 5, [1]), (16, 3, [2, 3])]), 16)
    with late_device() as device:
        query, cache, output = (
            torch.empty(size, dtype=torch.bfloat16, device=CUDA) for size in ((8, 4, 64), (4, 2, 2, 16, 64), (8, 256))
        )
        chunks = Varlen(by_torch, 24).chunks(tables, SHAPE, CUDA)
        assert chunks is not None
        chunks(query, cache, None, output, None)
        assert device.num_waits == 0
        device.pending.clear()  # torch's function has no variant for the CPU


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
def test_unsupported_dtypes_are_refused(shape: KVCacheShape, dtype: torch.dtype, why: str | None) -> None:
    problem = why_varlen_cannot_serve(shape, dtype)
    assert problem is None if why is None else why in str(problem)


def test_both_candidates_are_checked_and_timed() -> None:
    attend = Documented()
    choice = choose_chunk_attention(SMALL, torch.bfloat16, CPU, 8, attend)
    assert re.fullmatch(r"triton [\d.e+]+ ms, varlen_attn [\d.e+]+ ms", choice.reason)
    assert attend.num_calls == 2 * 2 + 7  # both windows' layers are compared, in two steps; one layer is timed


def test_a_wrong_candidate_is_not_timed() -> None:
    def wrong(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds, window: int | None
    ) -> torch.Tensor:
        return Documented()(query, key, value, bounds, None)  # forgets the window

    choice = choose_chunk_attention(SMALL, torch.bfloat16, CPU, 8, wrong)
    assert choice.name == OURS
    assert "varlen_attn is unusable: its output is off by" in choice.reason


def test_without_torchs_kernel_ours_is_chosen() -> None:
    choice = choose_chunk_attention(SMALL, torch.bfloat16, CPU, 8)
    assert choice.name == OURS
    assert re.match(r"triton [\d.e+]+ ms, varlen_attn is unusable: NotImplementedError", choice.reason)


def test_a_candidate_that_fails_while_it_is_timed_is_unusable() -> None:
    class Raises(Documented):
        def __call__(self, *args: Any) -> torch.Tensor:
            if self.num_calls == 4:
                raise RuntimeError("CUDA out of memory\nand a long story")
            return super().__call__(*args)

    choice = choose_chunk_attention(SMALL, torch.bfloat16, CPU, 8, Raises())
    assert choice.name == OURS
    assert choice.reason.endswith(" ms, varlen_attn is unusable: RuntimeError: CUDA out of memory")


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({OURS: 1.0, TORCH_VARLEN: 0.5}, TORCH_VARLEN),
        ({OURS: 1.0, TORCH_VARLEN: 0.94}, TORCH_VARLEN),
        ({OURS: 1.0, TORCH_VARLEN: 0.96}, OURS),  # a measurement may be off by as much
        ({OURS: 1.0, TORCH_VARLEN: 2.0}, OURS),
        ({OURS: 1.0}, OURS),
        ({TORCH_VARLEN: 9.0}, TORCH_VARLEN),
        ({}, OURS),
    ],
)
def test_torchs_kernel_must_be_faster_by_a_twentieth(times: dict[str, float], expected: str) -> None:
    assert fastest(times) == expected
