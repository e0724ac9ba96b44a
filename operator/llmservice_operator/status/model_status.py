"""What the status keeps of a model: a restart must neither forget its figures nor learn others."""

from __future__ import annotations

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.api.status import FetchStatus, ModelStatus, SizingStatus
from llmservice_operator.models.source import Figures, Model
from llmservice_operator.pods.pod_model import Fetching
from llmservice_operator.sizing.sizing_report import SizingReport
from llmservice_planner.shape import ModelShape, ShapeError

_GIB = 2**30


def known_figures(status: ModelStatus | None, source: ModelSource) -> Figures | None:
    """The figures that were learned of this very model; None where there are none, or somebody broke them."""
    if status is None or (status.uri, status.revision) != (source.uri, source.revision):
        return None
    if status.figures_from == "spec":  # they went with spec.model.shape
        return None
    try:
        shape = ModelShape.from_fields(status.shape) if status.shape else None
    except (ShapeError, TypeError):
        return None
    if shape is None and status.figures_from != "pod":
        return None
    return Figures(status.figures_from, shape, status.weights_file_bytes)


def remembered_report(sizing: SizingStatus | None, known: Figures, block_size: int) -> SizingReport | None:
    """What a server told before, while none tells now: scaled to zero, or out of reach for a moment."""
    if sizing is None or sizing.source != "pod":
        return None
    num_blocks = sizing.measured.blocks if sizing.measured else max(0, sizing.blocks - 1)
    return SizingReport(
        max_num_seqs=sizing.max_num_seqs,
        max_model_len=sizing.max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        weights_bytes=int(sizing.weights_gib * _GIB),
        kv_cache_bytes=sizing.kv_bytes_per_token * (num_blocks + 1) * block_size,
        activations_bytes=int(sizing.overhead_gib * _GIB),
        shape=known.shape,
    )


def model_status(source: ModelSource, model: Model, fetching: Fetching | None) -> ModelStatus:
    return ModelStatus(
        uri=source.uri,
        revision=source.revision,
        figures_from=model.figures_from,
        shape=model.shape.to_fields() if model.shape else None,
        weights_file_bytes=model.weights_file_bytes,
        fetch=fetch_status(fetching),
    )


def fetch_status(fetching: Fetching | None) -> FetchStatus | None:
    if fetching is None:
        return None
    total = fetching.total_bytes
    return FetchStatus(
        pods=fetching.pods, percent=fetching.percent, total_gib=round(total / _GIB, 2) if total else None
    )
