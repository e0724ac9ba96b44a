"""The blocks of requests: their tables grow, share what is cached, and give back what no window reaches any more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmservice_server.engine.block_pool import NULL_BLOCK, BlockPool, SwapSpace
from llmservice_server.engine.interfaces import BlockCopy
from llmservice_server.engine.request import Request, new_block_table


class SequenceBlocks:
    """Each group of layers has a table of its own; the tables of a request are equally long."""

    def __init__(self, pool: BlockPool, swap: SwapSpace | None) -> None:
        self.pool = pool
        self.swap = swap
        self._block_size = pool.groups.block_size
        self._num_groups = len(pool.groups)

    def length(self, num_tokens: int) -> int:
        """Of a table for so many tokens."""
        return -(-num_tokens // self._block_size)

    def own(self, request: Request) -> int:
        """The blocks that a running request holds, without those that were computed for others."""
        length, shared = len(request.block_table), request.num_shared_blocks
        return sum([length - max(shared, slid) for slid in request.num_slid])

    def held(self, request: Request) -> int:
        """All blocks that a running request holds."""
        return sum([len(request.block_table) - slid for slid in request.num_slid])

    def num_held_by_others(self, blocks: Iterable[int], holds: Mapping[int, int]) -> int:
        """How many of the blocks more requests hold than those counted in `holds`, by block."""
        num_holders = self.pool.num_holders
        return sum([num_holders[block] > holds[block] for block in blocks])

    def shared_tokens(self, request: Request) -> int:
        """The tokens of its prompt that lie in blocks which other requests hold too."""
        num_holders, num_blocks = self.pool.num_holders, request.num_prompt_tokens // self._block_size
        tables = (table[:num_blocks] for table in request.block_tables)
        return max(sum([num_holders[block] > 1 for block in table]) for table in tables) * self._block_size

    def to_come(self, request: Request) -> int:
        """The most blocks that a running request will still take for the tokens that are known."""
        return max(0, self.pool.groups.blocks(request.num_tokens) - self.held(request))

    def find(self, request: Request, first: int = 0) -> list[list[int]]:
        """Of each group, the cached blocks of the request's beginning, from block `first` on, that it would read.

        Its last token is left out, as computing it yields the next one.
        """
        if request.block_hashes is None:
            return [[] for _ in range(self._num_groups)]
        num_full = (request.num_tokens - 1) // self._block_size
        found = self.pool.lookup(request.block_hashes.first(num_full, request.token_ids), first)
        if self.pool.groups.slides and not first:  # it may have been swapped out with more tokens than are found
            for group, blocks in enumerate(found):
                unseen = min(len(blocks), self.pool.groups.first_seen(group, request.num_computed_tokens))
                blocks[:unseen] = [NULL_BLOCK] * unseen
        return found

    def finds_more(self, request: Request) -> bool:
        """Whether more of its beginning is cached than when it was last considered."""
        return bool(self.find(request, request.num_shared_blocks)[0])

    def consider(self, request: Request) -> tuple[int, int]:
        """Find blocks for a waiting request.

        Returns how many blocks it will take from those available, at most, and how many that are cached.
        """
        request.hits = self.find(request)
        num_hits = num_unheld = 0
        request.num_shared_blocks, request.num_slid = len(request.hits[0]), []
        for blocks in request.hits:
            num_null = blocks.count(NULL_BLOCK)
            request.num_slid.append(num_null)
            num_hits += len(blocks) - num_null
            num_unheld += self.pool.num_unheld(blocks[num_null:])
        return self.pool.groups.blocks(request.num_tokens) - num_hits + num_unheld, num_unheld

    def admit(self, request: Request, num_tokens: int) -> list[BlockCopy]:
        """Make tables for its first `num_tokens` tokens, which begin with its `hits`.

        Returns the copies that bring back what was swapped out.
        """
        groups, hits = self.pool.groups, request.hits
        request.hits = []
        request.num_slid = [groups.first_seen(group, request.num_computed_tokens) for group in range(len(hits))]
        for blocks in hits:
            self.pool.hold(blocks)
        tables = []
        for blocks, slid in zip(hits, request.num_slid, strict=True):
            missing = self.length(num_tokens) - max(slid, len(blocks))
            table = [NULL_BLOCK] * slid + blocks[slid:] + self.pool.allocate(missing)
            tables.append(new_block_table(table))
        request.block_table, *more = tables
        request.more_tables = tuple(more)
        return self._swap_in(request, len(hits[0]))

    def slide(self, request: Request) -> None:
        """Give back the blocks that neither the next token to be computed nor a later one sees."""
        groups = self.pool.groups
        if not groups.slides:
            return
        for group, table in enumerate(request.block_tables):
            slid, seen = request.num_slid[group], groups.first_seen(group, request.num_computed_tokens)
            if slid < seen:
                self.pool.free([block for block in table[slid:seen] if block != NULL_BLOCK])
                table[slid:seen] = new_block_table([NULL_BLOCK] * (seen - slid))
                request.num_slid[group] = seen

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Make its tables long enough for its first `num_tokens` tokens; False where the pool lacks blocks."""
        missing = self.length(num_tokens) - len(request.block_table)
        if missing <= 0:
            return True
        if missing * self._num_groups > self.pool.num_available:
            return False
        for table in request.block_tables:
            table.extend(self.pool.allocate(missing))
        return True

    def extend_at_most(self, request: Request, num_tokens: int) -> int:
        """As `extend`, as far as the pool has blocks; returns for how many tokens there is room."""
        room = len(request.block_table) + self.pool.num_available // self._num_groups
        self.extend(request, min(num_tokens, room * self._block_size))
        return len(request.block_table) * self._block_size

    def skip(self, request: Request, first: int, found: list[list[int]]) -> None:
        """Put the `found` blocks in the place of those from `first` on: at most one, which is filled in part."""
        tables = []
        for blocks in found:
            self.pool.hold(blocks)
        for table, blocks in zip(request.block_tables, found, strict=True):
            self.pool.free(table[first:])
            tables.append(table[:first] + new_block_table(blocks))
        request.block_table, *more = tables
        request.more_tables = tuple(more)
        request.num_computed_tokens = len(request.block_table) * self._block_size
        request.num_shared_blocks += len(found[0])
        self.slide(request)

    def swap_out(self, request: Request) -> list[BlockCopy]:
        """The copies of what it has computed to the swap space; none where computing it again is cheaper."""
        length = self.length(request.num_computed_tokens)
        held = [
            {place: table[place] for place in range(slid, length)}
            for table, slid in zip(request.block_tables, request.num_slid, strict=True)
        ]
        num_blocks = sum(map(len, held))
        if self.swap is None or not self.swap.pays(num_blocks, request.num_computed_tokens):
            return []
        targets = self.swap.allocate(num_blocks)
        copies: list[BlockCopy] = []
        for blocks in held:
            own = dict(zip(blocks, targets[len(copies) :], strict=False))
            request.swapped.append(own)
            copies += [BlockCopy(blocks[place], target) for place, target in own.items()]
        return copies

    def _swap_in(self, request: Request, num_hits: int) -> list[BlockCopy]:
        copies: list[BlockCopy] = []
        for table, slid, swapped in zip(request.block_tables, request.num_slid, request.swapped, strict=False):
            first = max(num_hits, slid)
            copies += [BlockCopy(source, table[place]) for place, source in swapped.items() if place >= first]
        self.drop_swapped(request)  # no later part of this plan swaps out, into what is still read
        return copies

    def drop_swapped(self, request: Request) -> None:
        for swapped in request.swapped:
            assert self.swap is not None  # noqa: S101 - only there something is swapped out to
            self.swap.free([*swapped.values()])
        request.swapped = []

    def release(self, request: Request) -> None:
        """Give back all blocks: of one sequence the last first, of all groups alike."""
        if self._num_groups == 1 and not self.pool.groups.slides:
            self.pool.free(request.block_table)
        else:
            places = zip(*request.block_tables, strict=True)
            self.pool.free([block for blocks in places for block in blocks if block != NULL_BLOCK])
        request.block_table, request.more_tables = new_block_table(), ()
        request.num_slid = [0] * self._num_groups
