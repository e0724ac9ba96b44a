"""`status.sizing.predictions`: what was predicted against what pods measured, and what that would change."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmservice_operator.api.spec import Manifest
from llmservice_operator.api.status import PredictionStatus
from llmservice_operator.children.deployment import template_of
from llmservice_operator.pods.pod import Pod
from llmservice_operator.scaling.load import Load
from llmservice_operator.sizing import Sized
from llmservice_planner.sizing.prediction_error import Prediction, StepGroup, step_predictions

_SMALL_PERCENT = 2.0
"""A change of the error by no more than this is not written."""


def predictions(
    sized: Sized, load: Load | None, steps: Sequence[StepGroup], startup_s: tuple[float, float] | None
) -> list[Prediction]:
    """Those whose figures are known; `startup_s` are the predicted and the measured time of the last start-up.

    A server that sized itself was given no prediction of its blocks.
    """
    found = []
    if sized.plan is not None and not sized.self_sized and load is not None and load.kv_blocks:
        found.append(Prediction("blocks", max(0, sized.plan.num_blocks - 1), load.kv_blocks, "blocks"))
    if sized.latency is not None:
        found += step_predictions(sized.latency, steps)
    if startup_s is not None:
        found.append(Prediction("startup", *startup_s, "seconds"))
    return [each for each in found if math.isfinite(each.error_ratio)]


def predictions_status(found: Sequence[Prediction], before: Sequence[PredictionStatus]) -> list[PredictionStatus]:
    """Where the error has hardly changed, what was written before; what is not known for the moment stays as well."""
    past = {each.quantity: each for each in before}
    for each in found:
        error = round(each.error_ratio * 100, 1)
        known = past.get(each.quantity)
        if known is None or abs(known.error_percent - error) > _SMALL_PERCENT:
            past[each.quantity] = PredictionStatus(
                quantity=each.quantity,
                predicted=_rounded(each.predicted),
                measured=_rounded(each.measured),
                unit=each.unit,
                error_percent=error,
            )
    return [past[quantity] for quantity in sorted(past)]  # in whatever order they became known


def measured_blocks(load: Load | None, pods: Sequence[Pod], deployment: Manifest | None) -> int | None:
    """Usable KV blocks, as pods of the Deployment's present template measured them.

    None while pods of an earlier template serve beside them: their settings may have been others.
    """
    template = template_of(deployment)
    if load is None or any(pod.serves and pod.template != template for pod in pods):
        return None
    return load.kv_blocks or None


def _rounded(value: float) -> float:
    """Four significant digits of a time; blocks are whole."""
    return value if value >= 1000 else float(f"{value:.4g}")
