import pytest
import torch

from llmservice_server.backend.cuda.kernels.jit import FP8, FP8_MAX
from llmservice_server.backend.cuda.kernels.layer_ops import store
from llmservice_server.backend.cuda.kernels.paged_decode import MAX_SPLITS, DecodeScratch, decode, num_splits

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
    splits: int,
    window: int | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every place that the kernels may write to holds NaN before."""
    head_dim = query.shape[2]
    scratch = DecodeScratch(len(lengths) * splits, HEADS, head_dim, query.device)
    for part in (scratch.sums, scratch.max, scratch.total):
        part.fill_(torch.nan)
    answer = torch.full((len(query), HEADS * head_dim), torch.nan)
    rows = torch.arange(len(lengths) - 1, -1, -1, dtype=torch.int32)  # in another order than the sequences'
    width = max(len(table) for table in tables)
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
    decode(
        query, cache, scales, rows, torch.tensor(lengths, dtype=torch.int32), padded, answer, splits, scratch, window
    )
    return answer.flip(0)


@pytest.mark.parametrize(
    ("splits", "window"), [(1, None), (2, None), (7, None), (MAX_SPLITS, None), (1, 33), (2, 33), (7, 33), (2, 1)]
)
def test_the_parts_of_a_context_add_up(splits: int, window: int | None) -> None:
    cache = cache_of(64)
    cache[0] = torch.nan
    lengths = [1, 16, 65, 0, 170]
    tables = [[5], [9], [3, 17, 2, 11, 8], [], [1, 4, 6, 7, 10, 12, 13, 14, 15, 16, 23]]
    query = torch.randn(5, HEADS, 64)
    answer = run(query, cache, lengths, tables, splits, window)
    for row, length in enumerate(lengths):
        wanted = expected(query[4 - row], cache, length, tables[row], window)
        torch.testing.assert_close(answer[row], wanted if length else torch.zeros(HEADS * 64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
def test_fp8_rows_are_read_with_their_scales(splits: int) -> None:
    cache = cache_of(96)
    scales = cache.abs().amax(-1) / FP8_MAX
    payload = (cache / scales[..., None]).to(FP8)
    query = torch.randn(1, HEADS, 96)
    answer = run(query, payload, [40], [[7, 2, 9]], splits, scales=scales)
    read = payload.float() * scales[..., None]
    torch.testing.assert_close(answer[0], expected(query[0], read, 40, [7, 2, 9], None), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what numpy thinks of NaN
def test_a_padded_row_of_a_batch_touches_nothing_but_its_answer() -> None:
    """As a captured graph has them: a slot, a table and a length that belong to the null block."""
    cache = cache_of(64)
    before = cache.clone()
    store(torch.full((2, 2 * KV_HEADS, 64), torch.nan), torch.tensor([0, 0], dtype=torch.int32), cache)
    answer = run(torch.full((2, HEADS, 64), torch.nan), cache, [0, 0], [[0], [0]], splits=2)
    assert torch.equal(cache, before)
    assert (answer == 0).all()


@pytest.mark.parametrize(
    ("num_seqs", "max_length", "expected_splits"),
    [(1, 8192, 64), (1, 100, 2), (8, 8192, 9), (64, 8192, 2), (256, 8192, 1), (256, 131072, 1)],
)
def test_few_sequences_are_split_so_that_all_processors_have_work(
    num_seqs: int, max_length: int, expected_splits: int
) -> None:
    assert num_splits(num_seqs, num_kv_heads=8, max_length=max_length, num_processors=132) == expected_splits
