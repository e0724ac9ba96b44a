"""The order in which a mixture's experts compute their tokens, and the sums of what they give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import jit, jit_for_any

_PAIRS = 1024  # of tokens and experts, at once
_COLUMNS = 512


@dataclass(frozen=True, slots=True)
class Routing:
    """Pairs of a token and one of its experts, as rows that are sorted by expert. All int32 on the device.

    The pairs of a single token are rows in their order, each a tile of its own, and no kernel has to sort them: `tiles`
    are then the experts chosen, int64 `[num_pairs]`, and `sources` and `places` None.
    """

    tiles: torch.Tensor  # [num_tiles, 3] expert, first row, end of the expert's rows; those that are too many: zeros
    tile_rows: int
    num_pairs: int
    experts_of_a_token: int
    sources: torch.Tensor | None = None  # [num_pairs] the pair of each row: token times its experts, plus place
    places: torch.Tensor | None = None  # [num_pairs] the row of each pair


@jit
def _histogram(
    chosen: tl.tensor,
    begin: tl.tensor,
    num_pairs: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """How many of the PAIRS pairs from `begin` on each expert has; those that do not exist are one more's."""
    pairs = begin + tl.arange(0, PAIRS)
    return tl.histogram(tl.load(chosen + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS).to(tl.int32), WIDTH)


@jit
def _plan_tiles(
    counts: tl.tensor,  # [WIDTH]
    cursors: tl.tensor,
    tiles: tl.tensor,
    num_tiles: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Write the first row of each expert, and all tiles."""
    experts = tl.arange(0, WIDTH)
    counts = tl.where(experts < NUM_EXPERTS, counts, 0)
    ends = tl.cumsum(counts, 0)
    tl.store(cursors + experts, ends - counts)
    of_expert = (counts + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(of_expert, 0)
    for number in range(tl.max(of_expert, 0)):
        tile = tiles + 3 * (tile_ends - of_expert + number)
        exists = number < of_expert
        tl.store(tile, experts, mask=exists)
        tl.store(tile + 1, ends - counts + number * ROWS, mask=exists)
        tl.store(tile + 2, ends, mask=exists)
    for begin in range(3 * tl.sum(of_expert, 0), 3 * num_tiles, PAIRS):
        rest = begin + tl.arange(0, PAIRS)
        tl.store(tiles + rest, tl.zeros((PAIRS,), tl.int32), mask=rest < 3 * num_tiles)


@jit
def _place(
    chosen: tl.tensor,
    cursors: tl.tensor,
    sources: tl.tensor,
    places: tl.tensor,
    begin: tl.tensor,
    num_pairs: tl.tensor,
    PAIRS: tl.constexpr,
) -> None:
    """Give each of the PAIRS pairs from `begin` on the next row of its expert."""
    pairs = begin + tl.arange(0, PAIRS)
    exists = pairs < num_pairs
    row = tl.atomic_add(cursors + tl.load(chosen + pairs, mask=exists, other=0), 1, mask=exists)
    tl.store(sources + row, pairs, mask=exists)
    tl.store(places + pairs, row, mask=exists)


@jit_for_any("num_pairs", "num_tiles")
def _route(
    chosen: tl.tensor,
    cursors: tl.tensor,
    sources: tl.tensor,
    places: tl.tensor,
    tiles: tl.tensor,
    num_pairs: tl.tensor,
    num_tiles: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # more than NUM_EXPERTS
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """All of it, by one program."""
    counts = _histogram(chosen, 0, num_pairs, NUM_EXPERTS, WIDTH, PAIRS)
    _plan_tiles(counts, cursors, tiles, num_tiles, NUM_EXPERTS, WIDTH, ROWS, PAIRS)
    tl.debug_barrier()
    _place(chosen, cursors, sources, places, 0, num_pairs, PAIRS)


@jit_for_any("num_pairs")
def _count(
    chosen: tl.tensor,
    counts: tl.tensor,
    num_pairs: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    found = _histogram(chosen, tl.program_id(0) * PAIRS, num_pairs, NUM_EXPERTS, WIDTH, PAIRS)
    tl.atomic_add(counts + tl.arange(0, WIDTH), found, mask=found > 0)


@jit_for_any("num_tiles")
def _plan(
    counts: tl.tensor,
    tiles: tl.tensor,
    num_tiles: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """The counts become cursors."""
    found = tl.load(counts + tl.arange(0, WIDTH))
    _plan_tiles(found, counts, tiles, num_tiles, NUM_EXPERTS, WIDTH, ROWS, PAIRS)


@jit_for_any("num_pairs")
def _place_all(
    chosen: tl.tensor,
    cursors: tl.tensor,
    sources: tl.tensor,
    places: tl.tensor,
    num_pairs: tl.tensor,
    PAIRS: tl.constexpr,
) -> None:
    _place(chosen, cursors, sources, places, tl.program_id(0) * PAIRS, num_pairs, PAIRS)


def route(chosen: torch.Tensor, num_experts: int, tile_rows: int) -> Routing:
    """Of the experts `[num_tokens, experts_of_a_token]` of each token, int64.

    The rows of an expert are in any order: no result depends on it. The number of tiles is not waited for, so that a
    CUDA graph can hold this: there are as many as there may be at most.
    """
    num_pairs = chosen.numel()
    if len(chosen) == 1:
        return Routing(chosen.flatten(), tile_rows, num_pairs, num_pairs)
    num_tiles = num_pairs // tile_rows + min(num_pairs, num_experts)
    width = 1 << num_experts.bit_length()
    numbers = torch.empty(width + 2 * num_pairs + 3 * num_tiles, dtype=torch.int32, device=chosen.device)
    sizes = [width, num_pairs, num_pairs, 3 * num_tiles]
    cursors, sources, places, tiles = torch.split(numbers, sizes)
    options = {"NUM_EXPERTS": num_experts, "WIDTH": width, "PAIRS": _PAIRS, "num_warps": 8}
    if num_pairs <= _PAIRS:
        _route[(1,)](chosen, cursors, sources, places, tiles, num_pairs, num_tiles, ROWS=tile_rows, **options)
    else:
        programs = (triton.cdiv(num_pairs, _PAIRS),)
        _count[programs](chosen, cursors.zero_(), num_pairs, **options)
        _plan[(1,)](cursors, tiles, num_tiles, ROWS=tile_rows, **options)
        _place_all[programs](chosen, cursors, sources, places, num_pairs, PAIRS=_PAIRS, num_warps=8)
    return Routing(tiles.view(-1, 3), tile_rows, num_pairs, chosen.shape[1], sources, places)


@jit
def _combine_experts(
    products: tl.tensor,
    places: tl.tensor,
    weights: tl.tensor,
    sums: tl.tensor,
    SIZE: tl.constexpr,
    EXPERTS_OF_A_TOKEN: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < SIZE
    total = tl.zeros((COLUMNS,), tl.float32)
    for expert in tl.static_range(EXPERTS_OF_A_TOKEN):
        pair = token * EXPERTS_OF_A_TOKEN + expert
        row = pair if ONE_TOKEN else tl.load(places + pair).to(tl.int64)
        part = tl.load(products + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * part
    tl.store(sums + token * SIZE + columns, total.to(sums.dtype.element_ty), mask=mask)


def combine(products: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
    """The sums `[num_tokens, size]` of each token's `products` `[num_pairs, size]` by its `weights`, float32.

    Bytes: products read once, sums written once.
    """
    num_tokens, size = len(weights), products.shape[1]
    sums = products.new_empty(num_tokens, size)
    _combine_experts[num_tokens, triton.cdiv(size, _COLUMNS)](
        products,
        products if routing.places is None else routing.places,
        weights.contiguous(),
        sums,
        SIZE=size,
        EXPERTS_OF_A_TOKEN=weights.shape[1],
        ONE_TOKEN=routing.places is None,
        COLUMNS=_COLUMNS,
    )
    return sums
