"""Where an engine's step spends its time, as torch.profiler sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from llmservice_server.attention.base import Attend, SequenceSlice, rotates
from llmservice_server.engine.engine import Engine
from llmservice_server.models.llama import LlamaModel


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Milliseconds of one step by kind, a mean over several.

    Where a step of decodes is computed by compiled calls that do a layer's every part, `layers_ms` is all of them.
    """

    layers_ms: float
    products_ms: float  # of hidden states and weights; the head's with the norm before it
    attention_ms: float  # storing keys and values included
    between_ms: float  # the model's rest: norms, rotary embedding, activation, residuals, embedding
    sampling_ms: float
    host_ms: float  # scheduling, laying out the step, bookkeeping


def profile_steps(engine: Engine, num_steps: int, before_step: Callable[[], None]) -> StepProfile:
    """Let `engine` do so many steps; `before_step` sees to it that it has work."""
    with _labelled(engine), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(num_steps):
            before_step()
            with record_function("step"):
                engine.step()
    kinds = ("step", "execute", "layers", "forward", "logits", "products", "attention")
    totals: dict[str, float] = dict.fromkeys(kinds, 0.0)
    spans: dict[str, list[tuple[float, float]]] = {"execute": [], "logits": []}
    for event in profiler.events() or []:
        if event.name in totals:
            totals[event.name] += event.time_range.elapsed_us() / 1000 / num_steps
        if event.name in spans:
            spans[event.name].append((event.time_range.start, event.time_range.end))
    sampling = _after_logits_ms(spans["execute"], spans["logits"]) / num_steps
    model, products = totals["forward"] + totals["logits"], totals["products"] + totals["logits"]
    return StepProfile(
        layers_ms=totals["layers"],
        products_ms=products,
        attention_ms=totals["attention"],
        between_ms=model - products - totals["attention"],
        sampling_ms=sampling,
        host_ms=totals["step"] - totals["layers"] - model - sampling,
    )


def _after_logits_ms(executions: list[tuple[float, float]], logits: list[tuple[float, float]]) -> float:
    """What follows the logits within the runner's calls; spans are microseconds, from and to."""
    total_us = 0.0
    for started, ended in executions:
        total_us += sum(ended - end for start, end in logits if started <= start and end <= ended)
    return total_us / 1000


@dataclass(slots=True)
class _Labelled:
    """A callable whose calls show in the profile."""

    wrapped: Callable[..., Any]
    label: str

    def __call__(self, *args: Any) -> Any:
        with record_function(self.label):
            return self.wrapped(*args)


class _LabelledAttend(_Labelled):
    """One step's attention, with whatever else the backend's has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


class _LabelledRotatingAttend(_LabelledAttend):
    def rotate_and_attend(self, *args: Any) -> Any:
        with record_function(self.label):
            return self.wrapped.rotate_and_attend(*args)  # type: ignore[attr-defined]


@contextmanager
def _labelled(engine: Engine) -> Iterator[None]:
    runner, model = engine.runner, engine.runner.model
    prepare = runner.attention.prepare

    def prepare_labelled(slices: Sequence[SequenceSlice]) -> Attend:
        attend = prepare(slices)
        labelled = _LabelledRotatingAttend if rotates(attend) else _LabelledAttend
        return cast("Attend", labelled(attend, "attention"))

    labels: list[tuple[Any, str, Callable[..., Any]]] = [
        (runner, "execute", _Labelled(runner.execute, "execute")),
        (runner.attention, "prepare", prepare_labelled),
        (model, "forward", _Labelled(model.forward, "forward")),
        (model, "logits", _Labelled(model.logits, "logits")),
    ]
    if path := runner.decode_path:
        labels.append((path, "run", _Labelled(path.run, "layers")))
    for layer in model.layers:
        labels += [
            (layer, name, _Labelled(getattr(layer, name), "products")) for name in ("qkv", "o", "gate_up", "down")
        ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in labels]
    try:
        for owner, name, labelled in labels:
            setattr(owner, name, labelled)
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def multiply_alone(model: LlamaModel, num_rows: int, num_sampled: int) -> Callable[[], None]:
    """A call that does a step's products with weights, the very packed ones, and nothing else."""
    config = model.config
    rows = {
        width: torch.randn(num_rows, width).to(model.dtype)
        for width in {config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim}
    }
    hidden, attended = rows[config.hidden_size], rows[config.num_heads * config.head_dim]

    @torch.inference_mode()
    def multiply() -> None:
        for layer in model.layers:
            layer.qkv(hidden)
            layer.o(attended)
            layer.gate_up(hidden)
            layer.down(rows[config.intermediate_size])
        model.lm_head(hidden[:num_sampled])

    return multiply
