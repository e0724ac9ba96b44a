import pytest
import torch

from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda.block_tables import BlockTables
from llmservice_server.backend.cuda.kernels import paged_prefill
from llmservice_server.backend.cuda.kernels.layer_ops import store
from llmservice_server.backend.cuda.kernels.paged_prefill import prefill, query_tiles, tile_rows, tokens_per_tile
from llmservice_server.backend.step_input import StepInput
from llmservice_server.backend.torch.attention import TorchAttention

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.mark.parametrize(("heads", "window"), [((6, 2), None), ((6, 2), 21), ((32, 1), 21)])
def test_one_launch_serves_prompts_later_chunks_cached_prefixes_and_single_tokens(
    heads: tuple[int, int], window: int | None
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    shape = KVCacheShape(num_heads, num_kv_heads, 64, (window,), 16, torch.float32)
    spans = [(0, 50), (37, 1), (16, 30), (0, 1), (70, 3)]
    tables = [[3, 18, 7, 2], [9, 1, 4], [5, 11, 6], [8], [10, 12, 13, 14, 15]]
    step = StepInput.of([(start, count, table) for (start, count), table in zip(spans, tables, strict=True)])
    before = StepInput.of([(0, start, table) for (start, _), table in zip(spans, tables, strict=True) if start])
    stored = torch.randn(len(before.token_ids), 2 * num_kv_heads, 64)
    num_tokens = sum(count for _, count in spans)
    heads_now = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, 64)
    query, key_value = heads_now[:, :num_heads], heads_now[:, num_heads:]

    reference = TorchAttention(shape, 20, CPU)
    reference.prepare(before)(0, torch.randn(len(stored), num_heads, 64), stored)
    wanted = reference.prepare(step)(0, query, key_value)

    cache = torch.full((20, num_kv_heads, 2, 16, 64), torch.nan)
    for part, rows in ((before, stored), (step, key_value)):
        store(rows, torch.from_numpy(part.slots(16)).int(), cache)
    tiles = torch.tensor(
        [*query_tiles([count for _, count in spans], tokens_per_tile(num_heads, num_kv_heads, 64, torch.float32))],
        dtype=torch.int32,
    )
    places = [(row, *span) for row, span in zip([0, 50, 51, 81, 82], spans, strict=True)]
    block_tables = BlockTables(torch.device("cpu"))
    block_tables.update([[7], [8]])  # so that no table is in the row of its sequence's number
    sequences = torch.tensor(
        [(*place, row) for place, row in zip(places, block_tables.update(step.block_tables), strict=True)],
        dtype=torch.int32,
    )
    output = torch.full((num_tokens, num_heads * 64), torch.nan)
    prefill(query, cache, None, output, window, tiles=tiles, sequences=sequences, tables=block_tables.matrix)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


def test_every_token_is_in_one_tile_and_the_longest_work_comes_first() -> None:
    assert [*query_tiles([5, 0, 1], 2)] == [(0, 4), (0, 2), (0, 0), (2, 0)]


@pytest.mark.parametrize(("heads", "head_dim", "tokens"), [((32, 8), 128, 32), ((28, 4), 128, 16), ((8, 8), 256, 64)])
def test_a_tile_holds_the_heads_that_share_a_key_head(heads: tuple[int, int], head_dim: int, tokens: int) -> None:
    assert tokens_per_tile(*heads, head_dim, torch.bfloat16) == tokens


@pytest.mark.parametrize(("width", "rows"), [(64, 128), (128, 64), (256, 32), (512, 16)])
def test_tiles_are_smaller_before_ampere(width: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_prefill, "has_little_shared_memory", lambda: True)
    assert tile_rows(group=4, width=width, itemsize=2) == rows


def test_a_tile_has_room_for_one_token_of_many_heads() -> None:
    assert tile_rows(group=71, width=256, itemsize=4) == 128
    assert tokens_per_tile(71, 1, 256, torch.float32) == 1
