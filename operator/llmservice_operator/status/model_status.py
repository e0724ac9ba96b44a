"""`status.model` and `status.sizing`: a restarted operator uses the same figures and does not restart pods."""

from __future__ import annotations

from typing import get_args

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.api.status import FetchStatus, MeasuredStatus, ModelCode, ModelStatus, SizingStatus
from llmservice_operator.locations import Figures, Model
from llmservice_operator.pods.pod_model import Fetching
from llmservice_operator.scaling.forecast import Forecast
from llmservice_operator.sizing import GIB, Sized, SizingReport
from llmservice_operator.status.autoscaling_status import WriteAllowance, throttled
from llmservice_planner.model.shape import ModelShape, ShapeError
from llmservice_planner.sizing.request import EXPECTED_TOKENS

_SERVER = "server"
"""What limited a number that the server worked out by itself."""
_EXPLANATION_LIMIT = 8192


def known_figures(status: ModelStatus | None, source: ModelSource) -> Figures | None:
    """The figures that the status has of this very model; None where there are none, or they are invalid."""
    if status is None or not is_of(status, source):
        return None
    if status.figures_from == "spec":  # they are read from spec.model.shape again
        return None
    try:
        shape = ModelShape.from_fields(status.shape) if status.shape else None
    except (ShapeError, TypeError):
        return None
    if shape is None and status.figures_from != "pod":
        return None
    return Figures(status.figures_from, shape, status.weights_file_bytes)


def is_of(status: ModelStatus, source: ModelSource) -> bool:
    """Whether the status is of this very model."""
    found = status.uri, status.revision, status.config_overrides
    return found == (source.uri, source.revision, source.overrides_json)


def model_status(source: ModelSource, model: Model, fetching: Fetching | None, code: str | None) -> ModelStatus:
    return ModelStatus(
        uri=source.uri,
        revision=source.revision,
        config_overrides=source.overrides_json,
        figures_from=model.figures_from,
        shape=model.shape.to_fields() if model.shape else None,
        weights_file_bytes=model.weights_file_bytes,
        code=code if code in get_args(ModelCode) else None,
        fetch=None if fetching is None else _fetch_status(fetching),
    )


def _fetch_status(fetching: Fetching) -> FetchStatus:
    total_gib = _gib(fetching.total_bytes) if fetching.total_bytes else None
    return FetchStatus(pods=fetching.pods, percent=fetching.percent, total_gib=total_gib)


def remembered_report(sizing: SizingStatus | None, known: Figures, block_size: int) -> SizingReport | None:
    """The report that the status kept, while no server answers: scaled to zero, or unreachable for a moment."""
    if sizing is None or sizing.source != "pod":
        return None
    num_blocks = sizing.measured.blocks if sizing.measured else max(0, sizing.blocks - 1)
    of_one_group = sizing.kv_bytes_per_token * (num_blocks + 1) * block_size
    block_groups = max(1, round(of_one_group / (sizing.kv_pool_gib * GIB))) if sizing.kv_pool_gib else 1
    return SizingReport(
        max_num_seqs=sizing.max_num_seqs,
        max_model_len=sizing.max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        weights_bytes=int(sizing.weights_gib * GIB),
        block_groups=block_groups,
        kv_cache_bytes=of_one_group // block_groups,
        activations_bytes=int(sizing.overhead_gib * GIB),
        shape=known.shape,
    )


def sizing_status(sized: Sized, measured: MeasuredStatus | None) -> SizingStatus | None:
    """The prediction with its working, and beside it what a server measured; None before either."""
    answer, report = sized.plan, sized.report
    if sized.self_sized and report is None:
        return None
    if answer is None:
        return None if report is None else _reported_sizing(report)
    return SizingStatus(
        source="pod" if report else "operator",
        max_num_seqs=report.max_num_seqs if report else answer.max_num_seqs,
        guaranteed_sequences=answer.guaranteed_sequences,
        expected_sequences=answer.expected_sequences,
        max_model_len=report.max_model_len if report else answer.max_model_len,
        kv_bytes_per_token=answer.kv_bytes_per_token,
        weights_gib=_gib(answer.weights_bytes),
        overhead_gib=_gib(answer.overhead_bytes),
        kv_pool_gib=_gib(answer.kv_pool_bytes),
        blocks=answer.num_blocks,
        limited_by=_SERVER if report else answer.limited_by,
        measured=measured,
        explanation="\n".join([*sized.notes, *answer.explanation])[:_EXPLANATION_LIMIT],
    )


def _reported_sizing(report: SizingReport) -> SizingStatus:
    """Without a prediction, the server's figures are all there is."""
    tokens = max(1, (report.num_blocks + 1) * report.block_size)
    groups = report.block_groups  # what windows would save is not known
    longest_blocks = max(1, groups * -(-report.max_model_len // report.block_size))
    typical_blocks = max(1, groups * -(-min(EXPECTED_TOKENS, report.max_model_len) // report.block_size))
    return SizingStatus(
        source="pod",
        max_num_seqs=report.max_num_seqs,
        guaranteed_sequences=report.num_blocks // longest_blocks,
        expected_sequences=report.num_blocks // typical_blocks,
        max_model_len=report.max_model_len,
        kv_bytes_per_token=groups * report.kv_cache_bytes // tokens,
        weights_gib=_gib(report.weights_bytes),
        overhead_gib=_gib(report.activations_bytes),
        kv_pool_gib=_gib(report.kv_cache_bytes),
        blocks=report.num_blocks + 1 if report.num_blocks else 0,  # an encoder has not even a null block
        limited_by=_SERVER,
        explanation="The server sized itself, for the model's figures could not be read before it ran, nor planned with"
        " after. These are the numbers that it found after loading.",
    )


def expected_tokens(before: int | None, forecast: Forecast | None, allowance: WriteAllowance) -> int | None:
    """The mean of what arrives, written rarely; what it was before where nothing arrives."""
    if forecast is None or forecast.demand.requests <= 0:
        return before
    demand = forecast.demand
    now = (demand.prompt_tokens + demand.cached_tokens + demand.output_tokens) / demand.requests
    written = throttled(before, now, allowance)
    return None if written is None else max(1, round(written))


def measured_status(
    sized: Sized, blocks: int, weights_bytes: float | None, expected_tokens: int | None = None
) -> MeasuredStatus:
    """The figures that a running server measured, against the predicted ones. `blocks` excludes the null block.

    A server that sized itself had no prediction: it bounds its pool by what its sequences can use, and by what it
    measured, so that a difference says nothing about the prediction.
    """
    predicted = None if sized.self_sized or sized.plan is None else max(0, sized.plan.num_blocks - 1)
    return MeasuredStatus(
        blocks=blocks,
        weights_gib=None if weights_bytes is None else _gib(weights_bytes),
        expected_tokens=expected_tokens,
        error_percent=None if predicted is None or not blocks else round((predicted - blocks) / blocks * 100, 1),
    )


def _gib(number_of_bytes: float) -> float:
    return round(number_of_bytes / GIB, 2)
