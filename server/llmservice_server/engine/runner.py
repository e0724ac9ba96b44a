"""One step on the device: lay the plan's tokens end to end, run the model, sample where a sequence is due a token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from llmservice_server.attention.base import AttentionBackend, SequenceSlice
from llmservice_server.attention.swapped_blocks import SwappedBlocks
from llmservice_server.engine.plan import Plan
from llmservice_server.engine.request import Request
from llmservice_server.messages import TokenLogprobs
from llmservice_server.models.llama import LlamaModel
from llmservice_server.sampling.prompt_logprobs import prompt_logprobs
from llmservice_server.sampling.sampler import Draw, draw
from llmservice_server.sampling.token_masks import TokenMasks

_PADDING = 0  # any token of the vocabulary: what comes of it is dropped


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
        self._masks = TokenMasks(model.config.vocab_size)
        self.swapped_blocks = swapped_blocks

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
        token_ids: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for share in plan.scheduled:
            end = share.start + share.num_tokens
            token_ids += share.request.token_ids[share.start : end]
            positions.extend(range(share.start, end))
            if share.samples:
                last_rows.append(len(token_ids) - 1)
            token_ids += [_PADDING] * share.num_padding
            positions.extend(range(end, end + share.num_padding))
        slices = [
            SequenceSlice(share.start, share.num_tokens + share.num_padding, share.request.block_table)
            for share in plan.scheduled
        ]
        sampling = [share.request for share in plan.scheduled if share.samples]
        grammars = [request.grammar for request in sampling if request.grammar is not None]
        masks = self._masks.begin(grammars) if grammars else None
        hidden = self._forward(token_ids, positions, slices)
        scores = prompt_logprobs(self.model, plan, hidden)
        if not last_rows:
            return StepResult(prompt_logprobs=scores)
        if len(last_rows) < len(token_ids):
            hidden = hidden[torch.tensor(last_rows, device=hidden.device)]
        return StepResult(draw(self.model.logits(hidden), sampling, masks), scores)

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
        hidden = self._forward([0] * num_tokens, positions, slices)
        self.model.logits(hidden[:num_seqs])

    def _forward(self, token_ids: list[int], positions: list[int], slices: list[SequenceSlice]) -> torch.Tensor:
        device = self.model.device
        return self.model.forward(
            torch.tensor(token_ids, device=device),
            torch.tensor(positions, device=device),
            self.attention.prepare(slices),
        )
