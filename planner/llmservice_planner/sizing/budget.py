"""The memory budget of a sizing request, from which the number of sequences follows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.model.encoders import ENCODER_BATCH
from llmservice_planner.sizing.gpu import GPU
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_planner.sizing.overhead import OverheadTerm, adapter_term, fixed_terms, logits_row_bytes
from llmservice_planner.sizing.request import SizingRequest
from llmservice_planner.sizing.step_tokens import LEAST_TOKENS, MOST_TOKENS, StepTokens, step_tokens

NULL_BLOCKS = 1
"""The null block, to which padding in block tables refers; it holds no token."""
_ROWS_SHARE = 1 / 16
"""Of the memory beside weights and fixed overhead, for rows of logits of sequences that seldom run at once."""


@dataclass(frozen=True)
class Budget:
    """Bytes over all GPUs. A sequence needs its blocks and one row of logits, both from `free_bytes`."""

    request: SizingRequest
    usable_bytes: int
    weights_bytes: int
    fixed_overhead: tuple[OverheadTerm, ...]
    row_bytes: int
    """Logits of one sequence in a step; 0 if the overhead was measured."""
    kv_bytes_per_token: int
    latency: LatencyModel | None
    """None if the device's rates are unknown."""
    step: StepTokens

    @classmethod
    def of(cls, request: SizingRequest) -> Budget:
        shape, device_count, dtype = request.shape, request.device_count, request.resolved_dtype
        weights = request.weights_bytes
        if weights is None:
            weights = shape.weights_bytes(dtype, request.quantization, on_cpu=request.on_cpu)
        if request.packs_tied_head:
            weights += shape.head_bytes(dtype, request.quantization, on_cpu=request.on_cpu)
        kv_bytes = shape.kv_bytes_per_token(request.resolved_kv_dtype, device_count)
        latency = LatencyModel.of(shape, request.device, device_count, dtype, weights, kv_bytes, request.quantization)
        step = _step(request, latency)
        measured = request.overhead_bytes_per_device
        if measured is None:
            terms = fixed_terms(shape, request.device, device_count, dtype, step.total, request.quantization)
            if request.max_loras:
                slots = adapter_term(
                    shape,
                    dtype,
                    request.max_loras,
                    request.max_lora_rank,
                    experts=request.lora_experts,
                    on_cpu=request.on_cpu,
                )
                terms = (*terms, slots)
            row = 0 if shape.is_encoder else device_count * logits_row_bytes(shape)
        else:
            terms = (OverheadTerm("measured", device_count * measured),)
            row = 0
        budget = cls(
            request=request,
            usable_bytes=device_count * int(request.device.memory_bytes * request.gpu_memory_utilization),
            weights_bytes=weights,
            fixed_overhead=terms,
            row_bytes=row,
            kv_bytes_per_token=kv_bytes,
            latency=latency,
            step=step,
        )
        return budget if budget.fits else budget.with_short_steps()

    def with_short_steps(self) -> Budget:
        """With the shortest default step, if the model fits with that; else the same."""
        if self.request.max_num_batched_tokens is not None or self.step.total <= LEAST_TOKENS:
            return self
        short = Budget.of(replace(self.request, max_num_batched_tokens=LEAST_TOKENS))
        room = "" if self.request.shape.is_encoder else " for the KV cache"
        step = replace(short.step, reason=f"as the activations of longer steps leave no room{room}")
        return replace(short, request=self.request, step=step) if short.fits else self

    @cached_property
    def groups(self) -> BlockGroups:
        """Of the model's layers."""
        return self.request.shape.block_groups(self.request.block_size, self.step.total)

    @property
    def block_bytes(self) -> int:
        request = self.request
        place_bytes = request.shape.place_bytes(request.resolved_kv_dtype, request.device_count)
        return request.block_size * self.groups.num_layers * place_bytes

    @property
    def free_bytes(self) -> int:
        """Memory for KV blocks and rows of logits; negative if the weights are too large."""
        return self.usable_bytes - self.weights_bytes - sum(term.total_bytes for term in self.fixed_overhead)

    @property
    def most_sequences(self) -> int:
        """As many of `least_sequence_tokens` as fit, each with its row of logits, beside one of the full length.

        An encoder's inputs take none of the memory that is left beside a full step.
        """
        if self.request.shape.is_encoder:
            return ENCODER_BATCH
        room = self.free_bytes - NULL_BLOCKS * self.block_bytes
        most = room // (self.groups.blocks(self.request.least_sequence_tokens) * self.block_bytes + self.row_bytes)
        if self.row_bytes:
            longest_bytes = self.groups.blocks(self.request.model_len) * self.block_bytes
            most = min(most, (room - longest_bytes) // self.row_bytes)
        return max(0, most)

    @property
    def worthwhile_rows(self) -> int | None:
        """Sequences whose rows of logits take little of the memory for blocks, or twice the typical ones that fit.

        More of them would seldom run at once, and rows are allocated. None: rows are part of a measured overhead.
        """
        if not self.row_bytes:
            return None
        room = max(0, self.free_bytes)
        typical = room // (self.groups.blocks(self.request.typical_tokens) * self.block_bytes + self.row_bytes)
        return max(1, int(_ROWS_SHARE * room) // self.row_bytes, 2 * typical)

    def sequences(self, tokens: int, max_num_seqs: int) -> int:
        """The number of sequences of `tokens` that the pool beside `max_num_seqs` rows of logits holds.

        Of an encoder, which has no pool, those that a step computes.
        """
        if self.request.shape.is_encoder:
            return min(max_num_seqs, self.step.total // tokens)
        blocks = self.pool_bytes(max_num_seqs) // self.block_bytes - NULL_BLOCKS
        return max(0, blocks // self.groups.blocks(tokens))

    def context_tokens(self, num_seqs: int) -> int:
        """Tokens in the cache of each of `num_seqs` typical sequences; the pool may hold fewer."""
        pool_tokens = self.pool_bytes(num_seqs) // self.kv_bytes_per_token
        return min(self.request.typical_tokens, pool_tokens // max(1, num_seqs))

    def decode_step_s(self, num_seqs: int) -> float | None:
        """Seconds of a step that decodes a token for each of `num_seqs`; None for an encoder or unknown rates."""
        if self.request.shape.is_encoder:
            return None
        return self.latency.decode_s(num_seqs, self.context_tokens(num_seqs)) if self.latency else None

    def pool_bytes(self, max_num_seqs: int) -> int:
        """The KV pool with `max_num_seqs` rows of logits; 0 for an encoder."""
        if self.request.shape.is_encoder:
            return 0
        return max(0, self.free_bytes - max_num_seqs * self.row_bytes)

    @property
    def shortfall_bytes(self) -> int:
        """The missing memory for one sequence of the full length; 0 if it fits."""
        rows = self.request.max_num_seqs or 1
        blocks = NULL_BLOCKS + self.groups.blocks(self.request.model_len)
        return max(0, blocks * self.block_bytes + rows * self.row_bytes - self.free_bytes)

    @property
    def fits(self) -> bool:
        """Whether a request of max_model_len tokens can be served."""
        return self.shortfall_bytes == 0


def _step(request: SizingRequest, latency: LatencyModel | None) -> StepTokens:
    most = None
    if latency is not None and request.itl_p99_s is not None:
        most = latency.longest_prefill(request.itl_p99_s, MOST_TOKENS)
    step = step_tokens(
        request.device.memory_bytes if isinstance(request.device, GPU) else None,
        total=request.max_num_batched_tokens,
        at_least=request.max_num_seqs or 1,
        most_for_target=most,
    )
    if request.shape.is_encoder and step.total < request.model_len:
        return replace(step, total=request.model_len, reason="as an encoder reads its longest input at once")
    return step
