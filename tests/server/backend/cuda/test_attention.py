"""The GPU backend in Triton's interpreter agrees with torch: caches of NaN, fragmented tables, mixed steps."""

from dataclasses import replace

import pytest
import torch

from llmservice_server.backend.agreement import BOUNDS, Case, relative_error
from llmservice_server.backend.base import Rotation
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda.attention import StepTables, TritonAttention, TritonStep
from llmservice_server.backend.cuda.kernels import paged_decode
from llmservice_server.backend.cuda.kernels.jit import FP8
from llmservice_server.backend.grouped import by_group
from llmservice_server.backend.step_input import StepInput
from llmservice_server.backend.torch.attention import TorchAttention
from llmservice_server.models.rope import rotate

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SPANS = ((0, 19), (17, 2), (33, 1))
"""Tokens before the step, and in it. The interpreter needs seconds for a hundred tokens."""
ONE_KEY_HEAD = (2, 1)
INTERPRETED_FP8_BOUND = 8e-2
"""The interpreter drops the carry when it rounds to e4m3, so that one number in thirty is halved."""


class OnlyStoresPrompts(TritonAttention):
    """Only stores the keys and values of a step whose sequences all begin with it: what a test's step finds cached.

    No test compares its output, which takes the interpreter most of the time; the step after it reads what was stored.
    """

    def prepare(self, step: StepInput) -> TritonStep:
        prepared = super().prepare(step)
        if not step.starts.any():
            prepared.chunks = None
        return prepared


def shape_of(
    head_dim: int = 64, block_size: int = 16, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float32
) -> KVCacheShape:
    return KVCacheShape(*heads, head_dim, (None, 20), block_size, dtype)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [*((head_dim, torch.float32) for head_dim in (64, 96, 128, 256, 512)), (96, torch.bfloat16), (128, torch.float16)],
)
def test_any_head_and_dtype_agrees_with_torch(head_dim: int, dtype: torch.dtype) -> None:
    case = Case(shape_of(head_dim, dtype=dtype), dtype, SPANS)
    assert relative_error(case, OnlyStoresPrompts, CPU) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [(6, 28, torch.float32), (16, 576, torch.float32), (70, 576, torch.float32), (70, 576, FP8)],
)
def test_latents_agree_with_torch(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """One row of a token is its key and its value, for all heads: more than a tile has, and wider than one."""
    shape = replace(shape_of(head_dim, heads=(heads, 1), dtype=dtype), is_latent=True)
    bound = INTERPRETED_FP8_BOUND if dtype == FP8 else BOUNDS[dtype]
    assert relative_error(Case(shape, torch.float32, SPANS), OnlyStoresPrompts, CPU) < bound


@pytest.mark.parametrize("block_size", [1, 32, 256])
def test_any_block_size_agrees_with_torch(block_size: int) -> None:
    case = Case(shape_of(block_size=block_size, heads=ONE_KEY_HEAD), torch.float32, SPANS)
    assert relative_error(case, OnlyStoresPrompts, CPU) < BOUNDS[torch.float32]


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (14, 2), (32, 1)])
def test_any_number_of_heads_may_share_a_key_head(heads: tuple[int, int]) -> None:
    case = Case(shape_of(heads=heads), torch.float32, SPANS)
    assert relative_error(case, OnlyStoresPrompts, CPU) < BOUNDS[torch.float32]


@pytest.mark.parametrize(
    ("of", "spans"),
    [(TritonAttention, ((0, 1),)), (TritonAttention, ((0, 130),)), (OnlyStoresPrompts, ((128, 1), (127, 2)))],
)
def test_any_length_agrees_with_torch(of: type[TritonAttention], spans: tuple[tuple[int, int], ...]) -> None:
    case = Case(shape_of(heads=ONE_KEY_HEAD), torch.float32, spans)
    assert relative_error(case, of, CPU) < BOUNDS[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_cache_agrees_with_rounded_keys_and_values(dtype: torch.dtype) -> None:
    case = Case(shape_of(dtype=FP8), dtype, SPANS)
    assert relative_error(case, OnlyStoresPrompts, CPU) < INTERPRETED_FP8_BOUND


@pytest.mark.parametrize(("softcap", "has_sinks"), [(1.5, False), (None, True), (1.5, True)])
def test_bounded_scores_and_sinks_agree_with_torch(softcap: float | None, has_sinks: bool) -> None:
    shape = replace(shape_of(), softcap=softcap, has_sinks=has_sinks)
    case = Case(shape, torch.float32, (*SPANS, (300, 1)))
    assert relative_error(case, OnlyStoresPrompts, CPU) < BOUNDS[torch.float32]


@pytest.mark.parametrize("with_norm", [False, True])
def test_rotate_and_attend_agrees_with_torch(with_norm: bool) -> None:
    torch.manual_seed(0)
    shape = shape_of(64)
    step = StepInput.of([(0, 5, [3]), (0, 1, [1]), (0, 18, [4, 2])])
    heads = torch.randn(24, 8, 64)
    angles = torch.rand(24, 1, 32) * 6
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    weight = torch.rand(6, 64) if with_norm else None
    plain = heads.clone()
    if weight is not None:
        plain[:, :6] = torch.nn.functional.rms_norm(plain[:, :6], (64,), eps=1e-5) * weight
    rotate(plain[:, :6], cos, sin)
    expected = TorchAttention(shape, 5, CPU).prepare(step)(0, plain[:, :4], plain[:, 4:])
    rotation = Rotation(cos, sin, None if weight is None else (weight, 1e-5))
    output = TritonAttention(shape, 5, CPU).prepare(step).rotate_and_attend(0, heads, rotation)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns about NaN
def test_nan_reaches_the_output() -> None:
    """The engine ends a request whose logits are NaN; attention must not turn them into numbers."""
    for spans in ([(9, 1), (6, 1)], [(9, 2), (6, 3)]):
        backend = TritonAttention(shape_of(), 4, CPU)
        tables = [[3], [1]]
        key_values = [torch.randn(12, 4, 64) for _ in spans]
        key_values[0][5, 0] = torch.nan
        before = StepInput.of([(0, start, table) for (start, _), table in zip(spans, tables, strict=True)])
        rows = [each[:start] for each, (start, _) in zip(key_values, spans, strict=True)]
        backend.prepare(before)(0, torch.randn(15, 4, 64), torch.cat(rows))
        step = StepInput.of([(*span, table) for span, table in zip(spans, tables, strict=True)])
        count = sum(count for _, count in spans)
        output = backend.prepare(step)(0, torch.randn(count, 4, 64), torch.randn(count, 4, 64))
        first = output.view(count, 4, 64)[: spans[0][1]]
        assert not first[:, :2].isfinite().any()
        assert first[:, 2:].isfinite().all()
        assert output[spans[0][1] :].isfinite().all()


def test_bytes_per_block_is_what_the_tensors_take() -> None:
    for dtype in (torch.bfloat16, FP8):
        shape = shape_of(dtype=dtype)
        caches = by_group(shape, lambda of_group: TritonAttention(of_group, 7, CPU)).caches
        assert sum(cache.nbytes for cache in caches) == 7 * shape.bytes_per_block


def test_decodes_are_separate_from_chunks_and_all_have_their_slots() -> None:
    runs = [(3, 1, [5]), (6, 3, [2, 7, 4]), (0, 1, [1])]
    tables = StepTables.of(StepInput.of(runs), block_size=4)
    assert tables.slots.tolist() == [5 * 4 + 3, 7 * 4 + 2, 7 * 4 + 3, 4 * 4, 4]
    assert tables.decode_rows.tolist() == [0, 4]
    assert tables.decode_lengths.tolist() == [4, 1]
    assert tables.chunks.tolist() == [[1, 6, 3]]
    assert tables.blocks[tables.chunk_firsts[0] :].tolist() == [2, 7, 4, 1]


def test_parts_are_combined_only_where_a_sequence_has_several(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    combine = paged_decode._combine

    class Counted:
        def __getitem__(self, grid: tuple[int, int]) -> object:
            launched.append(grid[0])
            return combine[grid]

    monkeypatch.setattr(paged_decode, "_combine", Counted())
    shape = replace(shape_of(), windows=(None,))
    for lengths in ((9, 12, 5, 3), (200, 3)):
        case = Case(shape, torch.float32, [(each, 1) for each in lengths])
        assert relative_error(case, OnlyStoresPrompts, CPU) < 1e-5
    assert launched == [2]  # of the second step alone
