"""One step on the device: lay the plan's tokens end to end, run the model, sample where a sequence is due a token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import torch

from llmservice_server.attention.base import AttentionBackend, Int64Array, SequenceSlice
from llmservice_server.attention.swapped_blocks import SwappedBlocks
from llmservice_server.engine.plan import Plan
from llmservice_server.engine.request import Request
from llmservice_server.engine.step_in_flight import LateTokens, LaunchedStep, StepInFlight, StepResult
from llmservice_server.engine.step_input import StepInput
from llmservice_server.models.llama import LlamaModel
from llmservice_server.sampling.prompt_logprobs import PromptLogprobs
from llmservice_server.sampling.sampler import Sampler
from llmservice_server.sampling.sampling_batch import SamplingBatch
from llmservice_server.sampling.token_masks import TokenMasks
from llmservice_server.transfer import to_device


class DecodePath(Protocol):
    """A faster way to compute steps that are decodes only."""

    def takes(self, slices: Sequence[SequenceSlice]) -> bool:
        """Whether it can compute such a step."""

    def run(
        self, token_ids: Int64Array, slices: Sequence[SequenceSlice], late: LateTokens | None = None
    ) -> torch.Tensor:
        """`LlamaModel.forward`'s states, `[num_seqs, hidden_size]`; valid until the next run."""


class ModelRunner:
    """Computes what the scheduler planned. Sequences share the weights' products and never see each other."""

    def __init__(
        self,
        model: LlamaModel,
        attention: AttentionBackend,
        swapped_blocks: SwappedBlocks | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self._sampler = sampler or Sampler()
        self._masks = TokenMasks(model.config.vocab_size)
        self.swapped_blocks = swapped_blocks
        self.decode_path: DecodePath | None = None

    def swap(self, plan: Plan) -> None:
        """Do the plan's copies: to be called once, before `execute`."""
        if self.swapped_blocks is None or not (plan.swap_out or plan.swap_in):
            return
        with torch.inference_mode():
            self.swapped_blocks.swap_out(plan.swap_out)
            self.swapped_blocks.swap_in(plan.swap_in)

    def recover(self) -> None:
        """Make the device usable after an exception. Raises RuntimeError where it is lost."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # an illegal access, say, fails every call from then on
            torch.cuda.empty_cache()

    def execute(self, plan: Plan) -> StepResult:
        """Compute every share of the plan, and the next token of each request whose share `samples`."""
        return self.sample(self.launch(plan)).wait()

    @torch.inference_mode()
    def launch(self, plan: Plan, before: StepInFlight | None = None) -> LaunchedStep:
        """Have the device run the model on the plan's tokens; some of them are what the step `before` draws."""
        step = StepInput.of(plan.scheduled)
        masks = self._begin_masks(step.sampling) if before is None else None
        late = before.late_tokens(step) if before is not None else None
        return LaunchedStep(plan, step, self._forward(step.token_ids, step.positions, step.slices, late), masks)

    @torch.inference_mode()
    def sample(self, launched: LaunchedStep, ended: Collection[Request] = ()) -> StepInFlight:
        """Have it draw the tokens that are due, but for requests that have ended since the launch.

        By now the host must have read the step before.
        """
        step, hidden = launched.step, launched.hidden
        if ended:
            step = step.without(ended)
        masks = launched.masks or self._begin_masks(step.sampling)
        scores = None
        if step.last_rows is not None:
            scores = PromptLogprobs(self.model, launched.plan, hidden)
            if not step.sampling:
                return StepInFlight((), None, scores)
            hidden = hidden.index_select(0, to_device(step.last_rows, hidden.device))
        return StepInFlight(step.sampling, self._sampler.draw(self.model.logits(hidden), step.sampling, masks), scores)

    def _begin_masks(self, requests: Sequence[Request]) -> Future[torch.Tensor] | None:
        grammars = [request.grammar for request in requests if request.grammar is not None]
        return self._masks.begin(grammars) if grammars else None

    @torch.inference_mode()
    def dummy_step(self, num_tokens: int, num_seqs: int, longest: int, block_size: int) -> torch.Tensor:
        """A step of `num_tokens` tokens, in sequences of `longest`, that draws a token for `num_seqs` of them.

        Returns what `Sampler.choose` does. Writes into the blocks from 1 on, so nothing may be cached yet.
        """
        slices = []
        first_block = 1
        positions: list[int] = []
        while len(positions) < num_tokens:
            count = min(longest, num_tokens - len(positions))
            num_blocks = -(-count // block_size)
            slices.append(SequenceSlice(0, count, range(first_block, first_block + num_blocks)))
            first_block += num_blocks
            positions.extend(range(count))
        hidden = self._forward(np.zeros(num_tokens, np.int64), np.array(positions, np.int64), slices)
        logits = self.model.logits(hidden[:num_seqs])
        kind = SamplingBatch.alike if logits.device.type == "cpu" else SamplingBatch.widest
        return self._sampler.choose(logits, kind(len(logits)))

    @torch.inference_mode()
    def warm_up(self, num_tokens: int, block_size: int) -> bool:
        """Take a step of each kind: what is compiled or made when it first runs is no request's wait.

        A prompt of `num_tokens`, a sequence that decodes, and a prompt that follows what is cached. Writes into the
        first blocks, as `dummy_step`. False where a token could not be drawn, as the logits are not finite.
        """
        prompt = self.dummy_step(num_tokens, 1, num_tokens, block_size)
        decode = self.dummy_step(1, 1, 1, block_size)
        if num_tokens > 2:
            rest = SequenceSlice(1, num_tokens - 1, range(1, 1 + -(-num_tokens // block_size)))
            self._forward(np.zeros(num_tokens - 1, np.int64), np.arange(1, num_tokens), [rest])
        return bool((prompt >= 0).all() and (decode >= 0).all())

    def _forward(
        self,
        token_ids: Int64Array,
        positions: Int64Array,
        slices: Sequence[SequenceSlice],
        late: LateTokens | None = None,
    ) -> torch.Tensor:
        if self.decode_path is not None and self.decode_path.takes(slices):
            return self.decode_path.run(token_ids, slices, late)
        device = self.model.device
        tokens = to_device(token_ids, device)
        if late is not None:
            late.put(tokens)
        return self.model.forward(tokens, to_device(positions, device), self.attention.prepare(slices))
