"""One step on the device: concatenate the plan's tokens, run the model, sample for the requests that are due a token.

A step is launched, then sampled, then read; the host waits only when it reads. Two steps may be in flight at once: the
second is planned and launched while the first computes, on the assumption that one more token is sampled for every
request, which the engine lets the scheduler count. That token is only on the device by then, so it is inserted there
(`PendingTokens`). The second is sampled after the first has been read, long before its states are computed, so the host
knows whatever sampling needs (penalties, grammars).

A request that the first step ends is computed once more, and its row is dropped. Its blocks are free at once: all work
is in the order of one stream, so a request that receives them writes later than whatever is in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Self

import numpy as np
import torch

from llmservice_server.backend.base import Attention, Backend, DecodePath, Model
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.sampling_batch import SamplingBatch
from llmservice_server.backend.step_input import Int64Array, PendingTokens, StepInput
from llmservice_server.backend.transfer import HostCopy, to_device
from llmservice_server.engine.interfaces import BlockCopy, Plan, Scheduled, StepResult
from llmservice_server.engine.request import MAX_LOGPROBS, Request
from llmservice_server.models.lora import AdapterSlots, SlotRows
from llmservice_server.sampling.grammar import Grammar
from llmservice_server.sampling.logit_adjustments import TokenMasks
from llmservice_server.sampling.sampler import Drawn, Draws, Logprobs, Sampler
from llmservice_server.types.errors import request_failure
from llmservice_server.types.messages import TokenLogprobs

_ROWS_AT_ONCE = 64  # float32 logits of a whole chunk over a large vocabulary would take hundreds of MB
_STAGED = 16
"""Blocks that are gathered on the device at a time: some tens of megabytes of a large model's."""
_PIECE_BYTES = 1 << 28
"""Of pinned memory at a time: torch rounds what it pins up to a power of two, so 5 GiB in one piece would take 8."""


class DeviceStep:
    """Implements `StepInFlight`."""

    def __init__(self, runner: ModelRunner, plan: Plan, after: DeviceStep | None) -> None:
        self._runner = runner
        self._plan = plan = runner.by_adapter(plan)
        self.requests = [share.request for share in plan.scheduled if share.samples]
        self._last_rows = _last_rows(plan.scheduled)
        pending = None if after is None else after.pending_tokens(self.requests, self._last_rows)
        self._follows = after is not None  # then masks depend on what that step samples
        self._masks = None if self._follows else runner.begin_masks(self.requests)
        self._hidden: torch.Tensor | None = runner.forward(
            step_input(plan.scheduled, pending), runner.adapter_rows(plan)
        )
        self.drawn: Drawn | None = None  # a row for each of `requests`
        self._prompt_logprobs: PromptLogprobs | None = None

    @torch.inference_mode()
    def sample(self, ended: Collection[Request] = ()) -> None:
        hidden, self._hidden = self._hidden, None
        assert hidden is not None  # noqa: S101 - a step is sampled once
        runner = self._runner
        if ended:
            kept = [place for place, request in enumerate(self.requests) if request not in ended]
            self.requests = [self.requests[place] for place in kept]
            self._last_rows = self._last_rows[kept]
        masks = runner.begin_masks(self.requests) if self._follows else self._masks
        if len(self._last_rows) < len(hidden):
            self._prompt_logprobs = PromptLogprobs(runner, self._plan, hidden)
            if not self.requests:
                return
            hidden = hidden.index_select(0, to_device(self._last_rows, hidden.device))
        self.drawn = runner.sampler.draw(runner.logits(hidden, self.requests), self.requests, masks)

    def wait(self) -> StepResult:
        draws = self.drawn.wait() if self.drawn is not None else Draws()
        failed = {self.requests[row]: problem for row, problem in draws.failed.items()}
        prompt_logprobs = self._prompt_logprobs.wait(failed) if self._prompt_logprobs is not None else {}
        return StepResult(self.requests, draws.token_ids, draws.logprobs, prompt_logprobs, failed)

    def pending_tokens(self, requests: Sequence[Request], last_rows: Int64Array) -> PendingTokens | None:
        """Which last tokens of the next step's `requests` this step samples; None where it samples none of them."""
        if self.drawn is None:
            return None
        row_of = {request: row for row, request in enumerate(self.requests)}
        pending = [
            (place, row_of[request])
            for place, request in zip(last_rows.tolist(), requests, strict=True)
            if request in row_of
        ]
        if not pending:
            return None
        places, rows = np.array(pending, np.int64).T
        return PendingTokens(places, rows, self.drawn.token_ids)


class ModelRunner:
    """Implements `Runner`. Sequences share the matrix products, and nothing else."""

    def __init__(
        self, model: Model, attention: Attention, backend: Backend, swapped_blocks: SwappedBlocks | None = None
    ) -> None:
        self.model = model
        self.attention = attention
        self.backend = backend
        self.swapped_blocks = swapped_blocks
        self.sampler = Sampler(backend.choose_tokens, backend.penalize)
        self.decode_path: DecodePath | None = None
        self.adapters: AdapterSlots | None = None
        self._masks = TokenMasks(model.config.vocab_size)

    @torch.inference_mode()
    def swap(self, plan: Plan) -> None:
        if self.swapped_blocks is not None and (plan.swap_out or plan.swap_in):
            self.swapped_blocks.swap_out(plan.swap_out)
            self.swapped_blocks.swap_in(plan.swap_in)

    def recover(self) -> None:
        self.backend.synchronize()  # an illegal access, say, fails every call from then on
        self.backend.release_memory()

    def execute(self, plan: Plan) -> StepResult:
        step = self.launch(plan)
        step.sample()
        return step.wait()

    @torch.inference_mode()
    def launch(self, plan: Plan, after: DeviceStep | None = None) -> DeviceStep:
        return DeviceStep(self, plan, after)

    @torch.inference_mode()
    def forward(self, step: StepInput, adapter_rows: Sequence[SlotRows] = ()) -> torch.Tensor:
        """The model's last states, `[num_tokens, hidden_size]`; valid until the next launch."""
        if adapter_rows:
            slots = np.full(len(step.token_ids), -1)
            for slot, rows in adapter_rows:
                slots[rows] = slot
            step = replace(step, adapter_slots=slots)
        if self.decode_path is not None and self.decode_path.takes(step):
            return self.decode_path.run(step)
        if self.adapters is None or not adapter_rows:
            return self._compute(step)
        with self.adapters.applied(adapter_rows):
            return self._compute(step)

    def logits(self, hidden: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """Of states of `requests`, a row of each."""
        rows = self._slot_rows((request, 1) for request in requests)
        if self.adapters is None or not rows:
            return self.model.logits(hidden)
        with self.adapters.applied(rows):
            return self.model.logits(hidden)

    def by_adapter(self, plan: Plan) -> Plan:
        """The plan with its shares sorted by adapter, those without one first."""
        if self.adapters is None or all(share.request.adapter is None for share in plan.scheduled):
            return plan
        return replace(plan, scheduled=sorted(plan.scheduled, key=lambda share: _slot(share.request)))

    def adapter_rows(self, plan: Plan) -> list[SlotRows]:
        """The rows of each adapter of a plan of `by_adapter`."""
        return self._slot_rows((share.request, share.num_tokens) for share in plan.scheduled)

    def _slot_rows(self, rows: Iterable[tuple[Request, int]]) -> list[SlotRows]:
        """Of successive requests, and how many rows each has."""
        if self.adapters is None:
            return []
        found, first = [], 0
        for slot, of_slot in groupby(rows, key=lambda each: _slot(each[0])):
            end = first + sum(count for _, count in of_slot)
            if slot >= 0:
                found.append(SlotRows(slot, slice(first, end)))
            first = end
        return found

    def _compute(self, step: StepInput) -> torch.Tensor:
        device = self.model.device
        tokens = to_device(step.token_ids, device)
        if step.pending is not None:
            step.pending.put(tokens)
        return self.model.forward(tokens, to_device(step.positions, device), self.attention.prepare(step))

    def begin_masks(self, requests: Sequence[Request]) -> Future[torch.Tensor] | None:
        grammars = [request.grammar for request in requests if isinstance(request.grammar, Grammar)]
        return self._masks.begin(grammars) if grammars else None

    @torch.inference_mode()
    def dummy_step(self, num_tokens: int, num_seqs: int, longest: int, block_size: int) -> torch.Tensor:
        """A step of `num_tokens` tokens, in sequences of `longest`, that samples a token for `num_seqs` of them.

        Returns the token ids. Writes into the blocks from 1 on, so nothing may be cached yet.
        """
        runs = []
        first_block = 1
        for first in range(0, num_tokens, longest):
            count = min(longest, num_tokens - first)
            num_blocks = -(-count // block_size)
            runs.append((0, count, range(first_block, first_block + num_blocks)))
            first_block += num_blocks
        logits = self.model.logits(self.forward(StepInput.of(runs))[:num_seqs])
        if self.backend.shares_memory:
            return self.sampler.choose(logits, SamplingBatch.identical(len(logits)))
        raw = logits.clone()  # as where every request wants log-probabilities
        token_ids = self.sampler.choose(logits, SamplingBatch.largest(len(logits)))
        Logprobs.of(raw, token_ids.clamp_min(0), MAX_LOGPROBS)
        return token_ids

    @torch.inference_mode()
    def warm_up(self, num_tokens: int, block_size: int) -> bool:
        """Take a step of each kind, so that no request waits for compilation or lazy initialization.

        A prompt of `num_tokens`, a sequence that decodes, and a prompt that follows what is cached. Writes into the
        first blocks, as `dummy_step`. False where a token could not be sampled because the logits are not finite.
        """
        prompt = self.dummy_step(num_tokens, 1, num_tokens, block_size)
        decode = self.dummy_step(1, 1, 1, block_size)
        if num_tokens > 2:
            self.forward(StepInput.of([(1, num_tokens - 1, range(1, 1 + -(-num_tokens // block_size)))]))
        return bool((prompt >= 0).all() and (decode >= 0).all())


def _slot(request: Request) -> int:
    adapter = request.adapter
    return -1 if adapter is None or adapter.slot is None else adapter.slot


def step_input(scheduled: Sequence[Scheduled], pending: PendingTokens | None = None) -> StepInput:
    """The plan's tokens, concatenated."""
    starts = np.array([share.start for share in scheduled], np.int64)
    tables = [share.request.block_table for share in scheduled]
    more = tuple(zip(*(share.request.more_tables for share in scheduled), strict=True))
    if _is_decode(scheduled):
        newest = np.array([share.request.token_ids[-1] for share in scheduled], np.int64)
        return StepInput(newest, starts, np.ones_like(starts), tables, pending, more)
    token_ids: list[int] = []
    for share in scheduled:
        token_ids += share.request.token_ids[share.start : share.start + share.num_tokens]
    counts = np.array([share.num_tokens for share in scheduled], np.int64)
    return StepInput(np.array(token_ids, np.int64), starts, counts, tables, pending, more)


def _last_rows(scheduled: Sequence[Scheduled]) -> Int64Array:
    """The index among the step's tokens of the last token of each request that is due one."""
    if _is_decode(scheduled):
        return np.arange(len(scheduled))
    last = np.cumsum([share.num_tokens for share in scheduled], dtype=np.int64) - 1
    return last[[share.samples for share in scheduled]]


def _is_decode(scheduled: Sequence[Scheduled]) -> bool:
    return all([share.samples and share.num_tokens == 1 for share in scheduled])  # noqa: C419 - a list is faster


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some successive tokens of one prompt."""

    request: Request
    token_ids: list[int]
    copy: HostCopy

    @classmethod
    def of(cls, runner: ModelRunner, request: Request, token_ids: list[int], hidden: torch.Tensor) -> Self:
        """`hidden` are the states that predict them."""
        wanted = to_device(np.array(token_ids, np.int64), hidden.device)
        logits = runner.logits(hidden, [request] * len(hidden))
        return cls(request, token_ids, HostCopy(Logprobs.of(logits, wanted, _num_top(request))))

    def as_messages(self, logprobs: Logprobs) -> list[TokenLogprobs]:
        return logprobs.as_messages(self.token_ids, [_num_top(self.request)] * len(self.token_ids))


class PromptLogprobs:
    """Log-probabilities of prompt tokens, where requested, from a step's states `[num_tokens, hidden_size]`."""

    def __init__(self, runner: ModelRunner, plan: Plan, hidden: torch.Tensor) -> None:
        self._pieces: list[_Piece] = []
        row = 0
        for share in plan.scheduled:
            if share.request.sampling.prompt_logprobs is not None:
                self._score(runner, share, hidden[row : row + share.num_tokens])
            row += share.num_tokens

    def _score(self, runner: ModelRunner, share: Scheduled, hidden: torch.Tensor) -> None:
        """The state of token `i` predicts token `i + 1`; what a preempted request has received is not sent again."""
        request = share.request
        first = max(share.start, len(request.prompt_logprobs))
        last = min(share.start + share.num_tokens, request.num_prompt_tokens - 1)
        for start in range(first, last, _ROWS_AT_ONCE):
            end = min(start + _ROWS_AT_ONCE, last)
            states = hidden[start - share.start : end - share.start]
            self._pieces.append(_Piece.of(runner, request, request.token_ids[start + 1 : end + 1], states))

    def wait(self, failed: dict[Request, str]) -> dict[Request, list[TokenLogprobs]]:
        """Waits for the device. Requests that the host fails to compute are added to `failed`."""
        by_request: defaultdict[Request, list[TokenLogprobs]] = defaultdict(list)
        for piece in self._pieces:
            logprobs = Logprobs(*piece.copy.wait())
            try:
                by_request[piece.request] += piece.as_messages(logprobs)
            except Exception as error:
                failed[piece.request] = request_failure(error)
        return by_request


def _num_top(request: Request) -> int:
    return request.sampling.prompt_logprobs or 0


def staging_bytes(shape: KVCacheShape) -> int:
    """What swapping takes on the device: the gathered blocks, and their parts before they are put together."""
    return 2 * _STAGED * shape.bytes_per_block


class SwappedBlocks:
    """`num_blocks` blocks, each with what all the caches hold of it in one row; pinned where the caches are on a GPU.

    `caches` are `[num_blocks, ...]` each. There a block is one copy that the host starts and does not wait for; all
    copies are in the order of the device's other work, so that a block is read before it is overwritten.
    """

    def __init__(self, caches: Sequence[torch.Tensor], num_blocks: int, piece_bytes: int = _PIECE_BYTES) -> None:
        self.num_blocks = num_blocks
        self._device = caches[0].device
        self._caches = [cache.flatten(1).view(torch.int32) for cache in caches]
        self._sizes = [cache.shape[1] for cache in self._caches]
        self._blocks_each = max(1, piece_bytes // (4 * sum(self._sizes)))
        self._pieces = [
            torch.empty(
                (min(self._blocks_each, num_blocks - first), sum(self._sizes)),
                dtype=torch.int32,
                pin_memory=self._device.type == "cuda",
            )
            for first in range(0, num_blocks, self._blocks_each)
        ]

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        for batch in _batches(copies):
            sources = self._indices([copy.source for copy in batch])
            staged = torch.cat([cache.index_select(0, sources) for cache in self._caches], dim=1)
            for row, copy in zip(staged, batch, strict=True):
                self._row(copy.target).copy_(row, non_blocking=True)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        for batch in _batches(copies):
            staged = torch.empty((len(batch), sum(self._sizes)), dtype=torch.int32, device=self._device)
            for row, copy in zip(staged, batch, strict=True):
                row.copy_(self._row(copy.source), non_blocking=True)
            targets = self._indices([copy.target for copy in batch])
            for cache, part in zip(self._caches, torch.split(staged, self._sizes, dim=1), strict=True):
                cache.index_copy_(0, targets, part)

    def _row(self, block: int) -> torch.Tensor:
        return self._pieces[block // self._blocks_each][block % self._blocks_each]

    def _indices(self, blocks: list[int]) -> torch.Tensor:
        return to_device(np.array(blocks), self._device)


def _batches(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    remaining = iter(copies)
    while batch := list(islice(remaining, _STAGED)):
        yield batch
