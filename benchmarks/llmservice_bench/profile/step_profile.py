"""The time of an engine's step by kind of operation, measured with torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from llmservice_server.backend.base import Attend, rotates
from llmservice_server.backend.layers import linears_of
from llmservice_server.backend.step_input import StepInput
from llmservice_server.engine.engine import Engine
from llmservice_server.models.decoder import DecoderModel
from llmservice_server.runtime.startup import model_runner


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Mean milliseconds of one step by kind.

    If compiled calls compute whole layers of a decode step, `layers_ms` is their sum.
    """

    layers_ms: float
    products_ms: float  # of hidden states and weights; the head includes its norm
    attention_ms: float  # including storing keys and values
    between_ms: float  # norms, rotary embedding, activation, residuals, embedding
    sampling_ms: float
    host_ms: float  # scheduling, inputs, bookkeeping


def profile_steps(engine: Engine, num_steps: int, before_step: Callable[[], None]) -> StepProfile:
    """Profile a number of steps of `engine`; `before_step` gives it work."""
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
    """The time after the logits within the runner's calls; spans are (start, end) in microseconds."""
    total_us = 0.0
    for started, ended in executions:
        total_us += sum(ended - end for start, end in logits if started <= start and end <= ended)
    return total_us / 1000


@dataclass(slots=True)
class _Labelled:
    """Wraps a callable so that its calls are in the profile."""

    wrapped: Callable[..., Any]
    label: str

    def __call__(self, *args: Any) -> Any:
        with record_function(self.label):
            return self.wrapped(*args)


class _LabelledAttend(_Labelled):
    """Wraps the attention of a step so that it is in the profile."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


class _LabelledRotatingAttend(_LabelledAttend):
    def rotate_and_attend(self, *args: Any) -> Any:
        with record_function(self.label):
            return self.wrapped.rotate_and_attend(*args)  # type: ignore[attr-defined]


@contextmanager
def _labelled(engine: Engine) -> Iterator[None]:
    runner = model_runner(engine)
    model, prepare = cast("DecoderModel", runner.model), runner.attention.prepare

    def prepare_labelled(step: StepInput) -> Attend:
        attend = prepare(step)
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
        for owner, names in ((layer.attention, ("qkv", "o")), (layer.mlp, ("gate_up", "down"))):
            labels += [(owner, name, _Labelled(getattr(owner, name), "products")) for name in names]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in labels]
    try:
        for owner, name, labelled in labels:
            setattr(owner, name, labelled)
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def multiply_alone(model: DecoderModel, num_rows: int, num_sampled: int) -> Callable[[], None]:
    """A function that computes only a step's matrix products, with the same packed weights."""
    config = model.config
    rows = {
        width: torch.randn(num_rows, width).to(model.dtype)
        for width in {config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim}
    }
    hidden, attended = rows[config.hidden_size], rows[config.num_heads * config.head_dim]

    @torch.inference_mode()
    def multiply() -> None:
        for layer in model.layers:
            qkv, o, gate_up, down = linears_of(layer)
            qkv(hidden)
            o(attended)
            gate_up(hidden)
            down(rows[config.intermediate_size])
        model.lm_head(hidden[:num_sampled])

    return multiply
