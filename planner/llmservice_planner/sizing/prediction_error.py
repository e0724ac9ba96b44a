"""What was predicted against what a running server measured, from its GET /sizing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmservice_planner.sizing.budget import NULL_BLOCKS
from llmservice_planner.sizing.explanation import format_bytes
from llmservice_planner.sizing.latency import LatencyModel, StepBatch
from llmservice_planner.sizing.plan import Plan

Quantity = Literal["blocks", "weights", "itl", "ttft", "startup"]

ENOUGH_STEPS = 100
"""Of a kind, for their time to be compared: the first ones allocate and compile."""


class MeasurementError(ValueError):
    """The text is no answer of GET /sizing; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A figure as predicted and as measured, in `unit`."""

    quantity: Quantity
    predicted: float
    measured: float
    unit: Literal["blocks", "bytes", "seconds"]

    @property
    def error_ratio(self) -> float:
        """Positive: too much was predicted. Infinite where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else math.inf


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Steps of one kind with about as many sequences."""

    kind: str
    steps: int
    seconds: float
    """Of all."""
    batch: StepBatch
    """The mean of what a step computed."""


def read_steps(report: Mapping[str, Any]) -> list[StepGroup]:
    """The `steps` of a server's report; none from a server that does not report them. Raises `MeasurementError`."""
    try:
        return [_group(each) for each in report.get("steps") or () if int(each["steps"]) > 0]
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise MeasurementError(f"its steps are not those of llmservice serve: {error!r}") from error


def read_report(text: str) -> Mapping[str, Any]:
    """A server's answer to GET /sizing. Raises `MeasurementError`."""
    try:
        report = json.loads(text)
    except ValueError as error:
        raise MeasurementError(f"it is no JSON: {error}") from error
    if not isinstance(report, Mapping):
        raise MeasurementError(f"it holds {type(report).__name__}, not an object")
    return report


def predictions(answer: Plan, latency: LatencyModel | None, report: Mapping[str, Any]) -> list[Prediction]:
    """A plan against a server's report; the times of steps where `latency` is known. Raises `MeasurementError`."""
    try:
        blocks, weights = int(report["num_blocks"]), int(report["memory_bytes"]["weights"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise MeasurementError(f"it is no answer of GET /sizing: {error!r}") from error
    found = [
        Prediction("blocks", max(0, answer.num_blocks - NULL_BLOCKS), blocks, "blocks"),
        Prediction("weights", answer.weights_bytes, weights, "bytes"),
    ]
    return found if latency is None else [*found, *step_predictions(latency, read_steps(report))]


def predictions_text(found: Sequence[Prediction]) -> str:
    """A table of at most 100 columns."""
    lines = [f"{'PREDICTED AGAINST MEASURED':<34}{'PREDICTED':>14}{'MEASURED':>14}{'ERROR':>10}"]
    for each in found:
        figures = (_shown(each.predicted, each.unit), _shown(each.measured, each.unit))
        error = f"{each.error_ratio:+.1%}" if math.isfinite(each.error_ratio) else "-"
        lines.append(f"{_NAMES[each.quantity]:<34}{figures[0]:>14}{figures[1]:>14}{error:>10}")
    return "\n".join(lines)


_NAMES: Mapping[Quantity, str] = {
    "blocks": "usable KV blocks",
    "weights": "weights",
    "itl": "a step that decodes (ITL)",
    "ttft": "a step with prompts (TTFT)",
    "startup": "start-up",
}


def _shown(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(round(value))
    return f"{value * 1000:,.2f} ms" if unit == "seconds" else f"{value:,.0f}"


def _group(fields: Mapping[str, Any]) -> StepGroup:
    steps = int(fields["steps"])
    names = ("num_seqs", "context_tokens", "prompt_tokens", "prompt_chunks", "attention_pairs")
    batch = StepBatch(*(float(fields[name]) / steps for name in names))
    return StepGroup(str(fields["kind"]), steps, float(fields["seconds"]), batch)


def step_predictions(latency: LatencyModel, groups: Sequence[StepGroup]) -> list[Prediction]:
    """The time of a step that decodes (`itl`), and of one that computes prompts (`ttft`), as the server composed them.

    The mean over all steps of a kind, weighted by their time. A request of an idle server waits for the steps of its
    prompt and no others, so an error of their time is one of TTFT.
    """
    found = []
    kinds: tuple[tuple[Quantity, str], ...] = (("itl", "decode"), ("ttft", "mixed"))
    for quantity, kind in kinds:
        of_kind = [group for group in groups if group.kind == kind]
        steps = sum(group.steps for group in of_kind)
        if steps >= ENOUGH_STEPS:
            predicted_s = sum(group.steps * latency.seconds(group.batch) for group in of_kind)
            measured_s = sum(group.seconds for group in of_kind)
            found.append(Prediction(quantity, predicted_s / steps, measured_s / steps, "seconds"))
    return found
