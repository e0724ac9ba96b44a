"""One step on the device: lay the plan's tokens end to end, run the model, sample where a request is due a token.

A step is launched, then sampled, then read; the host waits at the last alone. Two steps may be on their way at once:
the second is planned and launched while the first computes, on the assumption that every request will be drawn one more
token, which the engine lets the scheduler count. Only the device knows that token by then, so the device puts it in
(`LateTokens`). The second is sampled once the first has been read, which is long before its states are there: so
whatever sampling needs (penalties, grammars) is known to the host.

A request that the first step ends is computed once more in vain, and its row is dropped. Its blocks are free at once:
all work is in the order of one stream, so that a request that is given them writes later than whatever is in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from llmservice_server.backend.base import Attention, Backend, DecodePath, Int64Array, LateTokens, StepInput
from llmservice_server.backend.sampling_batch import SamplingBatch
from llmservice_server.backend.transfer import to_device
from llmservice_server.engine.plan import Plan, Scheduled
from llmservice_server.engine.request import Request
from llmservice_server.engine.runner import StepResult
from llmservice_server.models.llama import LlamaModel
from llmservice_server.runtime.prompt_logprobs import PromptLogprobs
from llmservice_server.runtime.swapped_blocks import SwappedBlocks
from llmservice_server.sampling.grammar import Grammar
from llmservice_server.sampling.logit_adjustments import TokenMasks
from llmservice_server.sampling.sampler import Drawn, Draws, Sampler


class DeviceStep:
    """Implements `StepInFlight`."""

    def __init__(self, runner: ModelRunner, plan: Plan, after: DeviceStep | None) -> None:
        self.requests = [share.request for share in plan.scheduled if share.samples]
        self._runner = runner
        self._plan = plan
        self._last_rows = _last_rows(plan.scheduled)
        late = None if after is None else after.late_tokens(self.requests, self._last_rows)
        self._masks = runner.begin_masks(self.requests) if after is None else None
        self._hidden: torch.Tensor | None = runner.forward(step_input(plan.scheduled, late))
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
        masks = self._masks or runner.begin_masks(self.requests)
        if len(self._last_rows) < len(hidden):
            self._prompt_logprobs = PromptLogprobs(runner.model, self._plan, hidden)
            if not self.requests:
                return
            hidden = hidden.index_select(0, to_device(self._last_rows, hidden.device))
        self.drawn = runner.sampler.draw(runner.model.logits(hidden), self.requests, masks)

    def wait(self) -> StepResult:
        draws = self.drawn.wait() if self.drawn is not None else Draws()
        failed = {self.requests[row]: problem for row, problem in draws.failed.items()}
        prompt_logprobs = self._prompt_logprobs.wait(failed) if self._prompt_logprobs is not None else {}
        return StepResult(self.requests, draws.token_ids, draws.logprobs, prompt_logprobs, failed)

    def late_tokens(self, requests: Sequence[Request], last_rows: Int64Array) -> LateTokens | None:
        """Which last tokens of the next step's `requests` this one draws; None where it draws none of them."""
        if self.drawn is None:
            return None
        row_of = {request: row for row, request in enumerate(self.requests)}
        late = [
            (place, row_of[request])
            for place, request in zip(last_rows.tolist(), requests, strict=True)
            if request in row_of
        ]
        if not late:
            return None
        places, rows = np.array(late, np.int64).T
        return LateTokens(places, rows, self.drawn.token_ids)


class ModelRunner:
    """Implements `Runner`. Sequences share the weights' products and never see each other."""

    def __init__(
        self, model: LlamaModel, attention: Attention, backend: Backend, swapped_blocks: SwappedBlocks | None = None
    ) -> None:
        self.model = model
        self.attention = attention
        self.backend = backend
        self.swapped_blocks = swapped_blocks
        self.sampler = Sampler(backend.choose_tokens)
        self.decode_path: DecodePath | None = None
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
    def forward(self, step: StepInput) -> torch.Tensor:
        """The model's last states, `[num_tokens, hidden_size]`; valid until the next launch."""
        if self.decode_path is not None and self.decode_path.takes(step):
            return self.decode_path.run(step)
        device = self.model.device
        tokens = to_device(step.token_ids, device)
        if step.late is not None:
            step.late.put(tokens)
        return self.model.forward(tokens, to_device(step.positions, device), self.attention.prepare(step))

    def begin_masks(self, requests: Sequence[Request]) -> Future[torch.Tensor] | None:
        grammars = [request.grammar for request in requests if isinstance(request.grammar, Grammar)]
        return self._masks.begin(grammars) if grammars else None

    @torch.inference_mode()
    def dummy_step(self, num_tokens: int, num_seqs: int, longest: int, block_size: int) -> torch.Tensor:
        """A step of `num_tokens` tokens, in sequences of `longest`, that draws a token for `num_seqs` of them.

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
        kind = SamplingBatch.alike if self.backend.shares_memory else SamplingBatch.widest
        return self.sampler.choose(logits, kind(len(logits)))

    @torch.inference_mode()
    def warm_up(self, num_tokens: int, block_size: int) -> bool:
        """Take a step of each kind, so that no request waits for what is compiled or made when it first runs.

        A prompt of `num_tokens`, a sequence that decodes, and a prompt that follows what is cached. Writes into the
        first blocks, as `dummy_step`. False where a token could not be drawn, as the logits are not finite.
        """
        prompt = self.dummy_step(num_tokens, 1, num_tokens, block_size)
        decode = self.dummy_step(1, 1, 1, block_size)
        if num_tokens > 2:
            self.forward(StepInput.of([(1, num_tokens - 1, range(1, 1 + -(-num_tokens // block_size)))]))
        return bool((prompt >= 0).all() and (decode >= 0).all())


def step_input(scheduled: Sequence[Scheduled], late: LateTokens | None = None) -> StepInput:
    """The plan's tokens, laid end to end."""
    starts = np.array([share.start for share in scheduled], np.int64)
    tables = [share.request.block_table for share in scheduled]
    if _is_decode(scheduled):
        newest = np.array([share.request.token_ids[-1] for share in scheduled], np.int64)
        return StepInput(newest, starts, np.ones_like(starts), tables, late)
    token_ids: list[int] = []
    for share in scheduled:
        token_ids += share.request.token_ids[share.start : share.start + share.num_tokens]
    counts = np.array([share.num_tokens for share in scheduled], np.int64)
    return StepInput(np.array(token_ids, np.int64), starts, counts, tables, late)


def _last_rows(scheduled: Sequence[Scheduled]) -> Int64Array:
    """Where among the step's tokens the last one lies of each request that is due a token."""
    if _is_decode(scheduled):
        return np.arange(len(scheduled))
    last = np.cumsum([share.num_tokens for share in scheduled], dtype=np.int64) - 1
    return last[[share.samples for share in scheduled]]


def _is_decode(scheduled: Sequence[Scheduled]) -> bool:
    return all([share.samples and share.num_tokens == 1 for share in scheduled])  # noqa: C419 - a list is faster
