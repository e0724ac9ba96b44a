import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmservice_server.backend.cuda.kernels.jit import FP8, FP8_MAX
from llmservice_server.backend.cuda.kernels.layer_ops import store
from llmservice_server.backend.cuda.kernels.paged_decode import DecodeScratch, WorkList, decode, num_items, split

pytestmark = pytest.mark.slow

BLOCK_SIZE, NUM_BLOCKS, KV_HEADS, HEADS = 16, 24, 2, 6


def cache_of(head_dim: int) -> torch.Tensor:
    torch.manual_seed(head_dim)
    return torch.randn(NUM_BLOCKS, KV_HEADS, 2, BLOCK_SIZE, head_dim)


def expected(
    query: torch.Tensor, cache: torch.Tensor, length: int, table: list[int], window: int | None
) -> torch.Tensor:
    """One sequence, `[HEADS * head_dim]`; zeros where there is no key."""
    first = 0 if window is None else max(0, length - window)
    rows = cache[table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, first:length]
    keys, values = rows.repeat_interleave(HEADS // KV_HEADS, dim=0).unbind(1)
    scores = torch.einsum("hd,hkd->hk", query, keys) / query.shape[-1] ** 0.5
    return torch.einsum("hk,hkd->hd", scores.softmax(-1), values).flatten()


def run(
    query: torch.Tensor,
    cache: torch.Tensor,
    lengths: list[int],
    tables: list[list[int]],
    more_parts: int,
    window: int | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every place that the kernels may write to holds NaN before. `more_parts`: beyond one for each sequence."""
    head_dim, num_seqs = query.shape[2], len(lengths)
    scratch = DecodeScratch(num_seqs + more_parts, HEADS, head_dim, query.device)
    for part in (scratch.sums, scratch.max, scratch.total):
        part.fill_(torch.nan)
    answer = torch.full((len(query), HEADS * head_dim), torch.nan)
    matrix = torch.zeros((num_seqs + 1, max(map(len, tables))), dtype=torch.int32)
    for row, table in enumerate(tables):
        matrix[num_seqs - row, : len(table)] = torch.tensor(table, dtype=torch.int32)
    order = range(num_seqs)  # rows and tables are in another order than the sequences
    places = torch.tensor([(num_seqs - 1 - number, num_seqs - number) for number in order], dtype=torch.int32)
    work = WorkList(*map(torch.from_numpy, split(np.array(lengths), window, num_seqs + more_parts)))
    decode(query, cache, scales, places, work, matrix, answer, scratch)
    return answer.flip(0)


@pytest.mark.parametrize(
    ("more_parts", "window"), [(1, None), (2, None), (7, None), (40, None), (1, 33), (2, 33), (7, 33), (2, 1)]
)
def test_the_parts_of_a_context_add_up(more_parts: int, window: int | None) -> None:
    cache = cache_of(64)
    cache[0] = torch.nan
    lengths = [1, 16, 65, 0, 170]
    tables = [[5], [9], [3, 17, 2, 11, 8], [], [1, 4, 6, 7, 10, 12, 13, 14, 15, 16, 23]]
    query = torch.randn(5, HEADS, 64)
    answer = run(query, cache, lengths, tables, more_parts, window)
    for row, length in enumerate(lengths):
        wanted = expected(query[4 - row], cache, length, tables[row], window)
        torch.testing.assert_close(answer[row], wanted if length else torch.zeros(HEADS * 64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("more_parts", [1, 3])
def test_fp8_rows_are_read_with_their_scales(more_parts: int) -> None:
    cache = cache_of(96)
    scales = cache.abs().amax(-1) / FP8_MAX
    payload = (cache / scales[..., None]).to(FP8)
    query = torch.randn(1, HEADS, 96)
    answer = run(query, payload, [140], [[7, 2, 9, 4, 5, 1, 3, 8, 10]], more_parts, scales=scales)
    read = payload.float() * scales[..., None]
    torch.testing.assert_close(
        answer[0], expected(query[0], read, 140, [7, 2, 9, 4, 5, 1, 3, 8, 10], None), rtol=1e-5, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what numpy thinks of NaN
def test_a_padded_row_of_a_batch_touches_nothing_but_its_answer() -> None:
    """As a captured graph has them: a slot, a table and a length that belong to the null block."""
    cache = cache_of(64)
    before = cache.clone()
    store(torch.full((2, 2 * KV_HEADS, 64), torch.nan), torch.tensor([0, 0], dtype=torch.int32), cache)
    answer = run(torch.full((2, HEADS, 64), torch.nan), cache, [0, 0], [[0], [0]], more_parts=2)
    assert torch.equal(cache, before)
    assert (answer == 0).all()


def test_one_long_sequence_among_many_short_ones_is_split_over_the_processors() -> None:
    lengths = np.array([1000] * 31 + [100_000] + [1000] * 32)
    most = num_items(64, num_programs=8, num_processors=132)
    assert most == 64 + 50
    items, firsts = split(lengths, None, most)
    sequences, begins, ends, _ = items[items[:, 0] >= 0].T
    long = sequences == 31
    assert (firsts[32] - firsts[31], long.sum()) == (31, 31)
    assert (ends - begins)[long].max() == 3264  # of 163,000 keys divided by 50
    assert sequences[: long.sum() - 1].tolist() == [31] * 30  # the longest parts first
    assert (np.diff(firsts) == 1).sum() == 63  # all others are whole


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.none() | st.integers(1, 3000), st.integers(1, 80))
def test_a_work_list_has_every_visible_key_once(lengths: list[int], window: int | None, more: int) -> None:
    items, firsts = split(np.array(lengths), window, len(lengths) + more)
    items = items[items[:, 0] >= 0]
    assert len(items) == firsts[-1] <= len(lengths) + more
    for number, length in enumerate(lengths):
        parts = sorted(items[items[:, 0] == number][:, 1:].tolist(), key=lambda part: part[2])
        assert [part[2] for part in parts] == [*range(firsts[number], firsts[number + 1])]
        keys = [key for begin, end, _ in parts for key in range(begin, end)]
        assert keys == [*range(max(0, length - (window or length)), length)]
        assert len(parts) == 1 or all(begin < end for begin, end, _ in parts)
    assert (np.diff(items[:, 2] - items[:, 1]) <= 0).all()
