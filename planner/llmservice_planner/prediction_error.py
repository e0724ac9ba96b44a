"""What was predicted against what a running server measured, from its GET /sizing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmservice_planner.latency import LatencyModel, StepBatch

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
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MeasurementError(f"its steps are not those of llmservice serve: {error!r}") from error


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
