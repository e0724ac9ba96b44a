"""`status.sizing.predictions`: what was predicted against what pods measured, and what that would change."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmservice_operator.api.spec import LLMServiceSpec
from llmservice_operator.api.status import PredictionStatus
from llmservice_operator.scaling.load import Load
from llmservice_operator.sizing import Sized, sizing_request
from llmservice_planner.prediction_error import Prediction, StepGroup, step_predictions
from llmservice_planner.sizing import max_num_seqs_with

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


def max_num_seqs_now(spec: LLMServiceSpec, sized: Sized, kv_blocks: int | None) -> int | None:
    """What sizing would choose with the blocks that pods measured; None where nothing is measured or predicted."""
    shape = sized.model.shape
    if not kv_blocks or sized.self_sized or sized.plan is None or shape is None or shape.is_encoder:
        return None
    if kv_blocks == sized.plan.num_blocks - 1:
        return sized.plan.max_num_seqs
    return max_num_seqs_with(sizing_request(spec, sized.model, shape, sized.device), kv_blocks)


def _rounded(value: float) -> float:
    """Four significant digits of a time; blocks are whole."""
    return value if value >= 1000 else float(f"{value:.4g}")
