"""Steps of prompts and decodes as CUDA graphs of everything but attention, which depends on the step's sequences.

A step of few tokens takes a GPU less time than the host needs to launch its kernels one by one: eleven a layer. Here a
layer takes a graph and at most four kernels of attention. Graphs are captured for a few numbers of tokens; a step uses
the next larger one. What its other rows compute is read by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from llmservice_server.backend.base import Decoder, RotatingAttend, Rotation
from llmservice_server.backend.cuda.attention import GraphAttention
from llmservice_server.backend.cuda.capture import Capture, Replay
from llmservice_server.backend.step_input import StepInput
from llmservice_server.backend.transfer import tables_to_device

MIXED_SIZES = range(64, 513, 64)
"""Tokens of a step. With more than 512 the matrix products of all but small models take longer than their launches."""


class MixedGraphs:
    """Implements `DecodePath` for steps of up to `max(sizes)` tokens, however many of each sequence.

    The largest is captured first, so that the others reuse its memory.
    """

    def __init__(self, model: Decoder, attention: GraphAttention, sizes: Sequence[int], capture: Capture) -> None:
        self._model = model
        self._attention = attention
        self._sizes = sorted(sizes)
        most, config = self._sizes[-1], model.config
        self._token_ids, self._positions = torch.zeros((2, most), dtype=torch.int32, device=model.device).unbind()
        self._hidden = self._rows(most, config.hidden_size)
        self._heads = self._rows(most, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        self._attended = self._rows(most, config.num_heads * config.head_dim)
        self._rotations = [
            (self._rows(most, 1, config.head_dim), self._rows(most, 1, config.head_dim)) for _ in model.rotaries
        ]
        self._graphs = {size: self._captured(size, capture) for size in self._sizes[::-1]}

    def takes(self, step: StepInput) -> bool:
        return len(step.token_ids) <= self._sizes[-1] and step.adapter_slots is None

    def run(self, step: StepInput) -> torch.Tensor:
        count = len(step.token_ids)
        begin, *layers = self._graphs[next(size for size in self._sizes if size >= count)]
        token_ids, positions = tables_to_device(
            [step.token_ids.astype(np.int32), step.positions.astype(np.int32)], self._model.device
        )
        self._token_ids[:count].copy_(token_ids)
        self._positions[:count].copy_(positions)
        if step.pending is not None:
            step.pending.put(self._token_ids)
        parts, inputs = self._attention.parts, self._attention.split(step)
        steps = [part.prepare(each) for part, each in zip(parts, inputs, strict=True)]
        for each in steps:
            each.output = self._attended[:count]
        attend = cast("RotatingAttend", self._attention.joined(steps))
        heads = self._heads[:count]
        rotations = [(cos[:count], sin[:count]) for cos, sin in self._rotations]
        begin()
        for index, (layer, replay) in enumerate(zip(self._model.layers, layers, strict=True)):
            norm = layer.attention.qk_norm
            qk_norm = None if norm is None else (norm, self._model.config.rms_norm_eps)
            rotation = Rotation(*rotations[self._model.rotary_of(index)], qk_norm)
            attend.rotate_and_attend(index, heads, rotation, layer.attention.sinks)
            replay()
        return self._hidden[:count]

    def _rows(self, *size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=self._model.dtype, device=self._model.device)

    def _captured(self, size: int, capture: Capture) -> list[Replay]:
        """What comes before the first layer's attention, and after that of each layer."""
        model, hidden, heads = self._model, self._hidden[:size], self._heads[:size]

        def begin() -> torch.Tensor:
            for kept, computed in zip(self._rotations, model.rotations(self._positions[:size]), strict=True):
                for target, source in zip(kept, computed, strict=True):
                    target[:size].copy_(source)
            hidden.copy_(model.embed(self._token_ids[:size]))
            return heads.copy_(model.project(0, hidden, None))

        def after(index: int) -> torch.Tensor:
            delta = model.finish(index, hidden, self._attended[:size])
            if index + 1 == len(model.layers):
                return hidden.add_(delta)
            return heads.copy_(model.project(index + 1, hidden, delta))

        works = [begin, *((lambda index=index: after(index)) for index in range(len(model.layers)))]
        return [capture(work)[0] for work in works]
