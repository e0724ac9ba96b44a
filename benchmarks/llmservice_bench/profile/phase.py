"""A phase of serving, with the bytes and operations that it needs at least."""

from __future__ import annotations

import random
from dataclasses import dataclass

from llmservice_server.backend.layers import linears_of
from llmservice_server.engine.engine import Engine
from llmservice_server.models.decoder import DecoderModel
from llmservice_server.runtime.startup import model_runner
from llmservice_server.types.messages import GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Phase:
    """`num_seqs` sequences of `context` tokens: a step computes all of them (prefill) or one more of each (decode)."""

    kind: str  # prefill, decode
    num_seqs: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.num_seqs} x {self.context}"

    @property
    def num_rows(self) -> int:
        """Tokens of a step."""
        return self.num_seqs * (self.context if self.kind == "prefill" else 1)

    def least_bytes(self, model: DecoderModel) -> int:
        """Bytes read: each weight once and, when decoding, the keys and values of each sequence."""
        weights = sum(linear.nbytes for layer in model.layers for linear in linears_of(layer)) + model.lm_head.nbytes
        config = model.config
        kv_bytes_per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * model.dtype.itemsize
        return weights + (self.num_seqs * self.context * kv_bytes_per_token if self.kind == "decode" else 0)

    def least_operations(self, model: DecoderModel) -> int:
        """Operations: two per weight and row, and those of attention."""
        config = model.config
        attended = config.num_heads * config.head_dim
        layer = 2 * attended + 2 * config.num_kv_heads * config.head_dim + 3 * config.intermediate_size
        layers, head = config.num_layers * config.hidden_size * layer, config.vocab_size * config.hidden_size
        seen = self.num_seqs * (self.context * (self.context + 1) // 2 if self.kind == "prefill" else self.context)
        attention = 4 * config.num_layers * attended * seen
        return 2 * (layers * self.num_rows + head * self.num_seqs) + attention


class PhaseLoad:
    """Gives an idle engine the work of a phase, step by step.

    Raises ValueError if the engine has too little memory, because empty steps would be measured.
    """

    def __init__(self, engine: Engine, phase: Phase, most_steps: int) -> None:
        self.engine = engine
        self.phase = phase
        self._ids: list[str] = []
        if phase.kind == "decode":
            slack = phase.num_seqs  # steps that the first sequence may be ahead of the last
            for _ in range(phase.num_seqs):
                self._add(most_steps + slack)
            begun: set[str] = set()
            while len(begun) < phase.num_seqs:
                outputs = engine.step().outputs
                if errors := {output.error for output in outputs if output.error is not None}:
                    raise ValueError(f"{phase.name}: {', '.join(sorted(errors))}")
                begun.update(output.request_id for output in outputs)

    def before_step(self) -> None:
        """Prepare the next step; called before each measured step."""
        if self.phase.kind == "prefill":
            for _ in range(self.phase.num_seqs):
                self._add(1)

    def end(self) -> None:
        self.engine.abort(self._ids)
        self.engine.step()

    def _add(self, max_tokens: int) -> None:
        request_id = f"{self.phase.name}, number {len(self._ids)}"
        dice = random.Random(request_id)  # noqa: S311 - a prompt, no secret
        vocabulary = range(model_runner(self.engine).model.config.vocab_size)
        self._ids.append(request_id)
        self.engine.add(
            GenerateRequest(
                request_id=request_id,
                prompt_token_ids=dice.choices(vocabulary, k=self.phase.context),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                arrival_s=0.0,
            )
        )
