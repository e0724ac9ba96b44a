"""A phase of serving to be profiled, and the least that it has to read and to compute."""

from __future__ import annotations

import random
from dataclasses import dataclass

from llmservice_server.engine.engine import Engine
from llmservice_server.messages import Generate, SamplingParams
from llmservice_server.models.llama import LlamaModel


@dataclass(frozen=True, slots=True)
class Phase:
    """`num_seqs` sequences of `context` tokens: a step computes them all (prefill), or one more of each (decode)."""

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

    def least_bytes(self, model: LlamaModel) -> int:
        """Each weight once, and on decoding the keys and values of each sequence."""
        weights = sum(linear.nbytes for linear in model.linears)
        config = model.config
        kv_bytes_per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * model.dtype.itemsize
        return weights + (self.num_seqs * self.context * kv_bytes_per_token if self.kind == "decode" else 0)

    def least_operations(self, model: LlamaModel) -> int:
        """Two for each weight and row, and those of attention over what each row sees."""
        config, size = model.config, model.dtype.itemsize
        head = model.lm_head.nbytes // size
        layers = sum(linear.nbytes for linear in model.linears) // size - head
        seen = self.num_seqs * (self.context * (self.context + 1) // 2 if self.kind == "prefill" else self.context)
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * seen
        return 2 * (layers * self.num_rows + head * self.num_seqs) + attention


class PhaseLoad:
    """Gives an idle engine a phase's work, one step after the other.

    Raises ValueError where the engine has no room for it: empty steps would be very fast.
    """

    def __init__(self, engine: Engine, phase: Phase, most_steps: int) -> None:
        self.engine = engine
        self.phase = phase
        self._ids: list[str] = []
        if phase.kind == "decode":
            slack = phase.num_seqs  # steps that the first may have done before the last has begun
            for _ in range(phase.num_seqs):
                self._add(most_steps + slack)
            begun: set[str] = set()
            while len(begun) < phase.num_seqs:
                outputs = engine.step().outputs
                if errors := {output.error for output in outputs if output.error is not None}:
                    raise ValueError(f"{phase.name}: {', '.join(sorted(errors))}")
                begun.update(output.request_id for output in outputs)

    def before_step(self) -> None:
        """To be called before each step that is measured."""
        if self.phase.kind == "prefill":
            for _ in range(self.phase.num_seqs):
                self._add(1)

    def end(self) -> None:
        self.engine.abort(self._ids)
        self.engine.step()

    def _add(self, max_tokens: int) -> None:
        request_id = f"{self.phase.name}, number {len(self._ids)}"
        dice = random.Random(request_id)  # noqa: S311 - a prompt, no secret
        vocabulary = range(self.engine.runner.model.config.vocab_size)
        self._ids.append(request_id)
        self.engine.add(
            Generate(
                request_id=request_id,
                prompt_token_ids=dice.choices(vocabulary, k=self.phase.context),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                arrival_s=0.0,
            )
        )
