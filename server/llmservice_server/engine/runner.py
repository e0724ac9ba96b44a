"""One step on the device: lay the plan's tokens end to end, run the model, sample where a sequence is due a token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmservice_server.attention.base import AttentionBackend, Int64Array, SequenceSlice
from llmservice_server.attention.swapped_blocks import SwappedBlocks
from llmservice_server.engine.plan import Plan
from llmservice_server.engine.request import Request
from llmservice_server.engine.step_input import StepInput
from llmservice_server.messages import TokenLogprobs
from llmservice_server.models.llama import LlamaModel
from llmservice_server.sampling.prompt_logprobs import prompt_logprobs
from llmservice_server.sampling.sampler import Draw, Sampler, choose
from llmservice_server.sampling.sampling_batch import SamplingBatch
from llmservice_server.sampling.token_masks import TokenMasks

if TYPE_CHECKING:
    from llmservice_server.engine.decode_graphs import DecodeGraphs  # brings Triton along


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has found out."""

    draws: list[Draw] = field(default_factory=list)  # of the shares that sample, in the plan's order
    prompt_logprobs: dict[Request, list[TokenLogprobs]] = field(default_factory=dict)


class ModelRunner:
    """Computes what the scheduler planned. Sequences share the weights' products and never see each other."""

    def __init__(
        self, model: LlamaModel, attention: AttentionBackend, swapped_blocks: SwappedBlocks | None = None
    ) -> None:
        self.model = model
        self.attention = attention
        self._sampler = Sampler()
        self._masks = TokenMasks(model.config.vocab_size)
        self.swapped_blocks = swapped_blocks
        self.graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def swap(self, plan: Plan) -> None:
        """Do the plan's copies: to be called once, before `execute`."""
        if self.swapped_blocks is not None and plan.swap_out:
            self.swapped_blocks.swap_out(plan.swap_out)
        if self.swapped_blocks is not None and plan.swap_in:
            self.swapped_blocks.swap_in(plan.swap_in)

    def recover(self) -> None:
        """Make the device usable after an exception. Raises RuntimeError where it is lost."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # an illegal access, say, fails every call from then on
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        """Compute every share of the plan, and the next token of each request whose share `samples`."""
        step = StepInput.of(plan.scheduled)
        masks = None
        if grammars := [request.grammar for request in step.sampling if request.grammar is not None]:
            masks = self._masks.begin(grammars)
        hidden = self._forward(step.token_ids, step.positions, step.slices)
        if step.last_rows is None:
            return StepResult(self._sampler.draw(self.model.logits(hidden), step.sampling, masks))
        scores = prompt_logprobs(self.model, plan, hidden)
        if not step.sampling:
            return StepResult(prompt_logprobs=scores)
        hidden = hidden[_on(hidden.device, step.last_rows)]
        return StepResult(self._sampler.draw(self.model.logits(hidden), step.sampling, masks), scores)

    @torch.inference_mode()
    def dummy_step(self, num_tokens: int, num_seqs: int, longest: int, block_size: int) -> None:
        """A step of `num_tokens` tokens, in sequences of `longest`, that yields logits for `num_seqs` of them.

        Writes into the blocks from 1 on, so nothing may be cached yet.
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
        choose(logits, SamplingBatch.greedy(len(logits)))

    @torch.inference_mode()
    def warm_up(self, num_tokens: int, block_size: int) -> None:
        """Take a step of each kind: what is compiled or made when it first runs is no request's wait.

        A prompt of `num_tokens`, a sequence that decodes, and a prompt that follows what is cached. Writes into the
        first blocks, as `dummy_step`.
        """
        self.dummy_step(num_tokens, 1, num_tokens, block_size)
        self.dummy_step(1, 1, 1, block_size)
        if num_tokens > 2:
            rest = SequenceSlice(1, num_tokens - 1, range(1, 1 + -(-num_tokens // block_size)))
            self._forward(np.zeros(num_tokens - 1, np.int64), np.arange(1, num_tokens), [rest])

    def _forward(self, token_ids: Int64Array, positions: Int64Array, slices: list[SequenceSlice]) -> torch.Tensor:
        if self.graphs is not None and self.graphs.takes(slices):
            return self.graphs.run(token_ids, slices)
        device = self.model.device
        return self.model.forward(
            _on(device, token_ids),
            _on(device, positions),
            self.attention.prepare(slices),
        )


def _on(device: torch.device, numbers: Int64Array) -> torch.Tensor:
    """As a tensor there; from pinned memory, as from any other a GPU's copy keeps the host waiting."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
