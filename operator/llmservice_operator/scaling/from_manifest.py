"""What a simulation needs of a manifest: the service, its sizing and the autoscaler's policy, without a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.api.resource import KIND, LLMService
from llmservice_operator.api.spec import Slo
from llmservice_operator.locations import Model, ModelLocation
from llmservice_operator.scaling.decision import scale_policy
from llmservice_operator.scaling.policy import ScalePolicy
from llmservice_operator.sizing import Sized, SizingProblem, device_of, size, sizing_request
from llmservice_planner.model.shape import ModelShape, ShapeError
from llmservice_planner.model.source import ModelFigures
from llmservice_planner.sizing.plan import Plan, SizingRequest


class ManifestError(ValueError):
    """The manifest can't be simulated; the message says what to change."""


@dataclass(frozen=True, slots=True)
class SizedService:
    """A service as the operator would size and scale it."""

    service: LLMService
    sized: Sized
    request: SizingRequest
    """What the plan was made of."""
    plan: Plan
    policy: ScalePolicy | None
    """None without `spec.autoscaling`."""
    replicas: int
    """With which the service starts: `minReplicas`, or without autoscaling `spec.replicas`."""

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def slo(self) -> Slo:
        return self.service.spec.slo


def sized_service(manifest: Mapping[str, Any], figures: ModelFigures | None = None) -> SizedService:
    """The service of an LLMService manifest; raises ManifestError, and ShapeError for weights that are broken.

    `figures` are those of a checkpoint that the caller has read; without them `spec.model.shape` is needed.
    """
    service = _parse(manifest)
    spec = service.spec
    autoscaling = spec.autoscaling
    if autoscaling is not None and autoscaling.min_replicas > autoscaling.max_replicas:
        raise ManifestError("spec.autoscaling: minReplicas must not be above maxReplicas")
    if figures is None:
        figures = ModelFigures(_shape(spec.model))
    shape = figures.shape
    weights_bytes = figures.weights_bytes(shape.dtype if spec.model.dtype == "auto" else spec.model.dtype)
    model = Model(ModelLocation("file", spec.model.uri), shape, weights_bytes, figures_from="spec")
    sized = size(spec, model)
    if isinstance(sized, SizingProblem):
        raise ManifestError(f"{sized.reason}: {sized.message}")
    assert sized.plan is not None  # noqa: S101 - a known shape is planned
    request = sizing_request(spec, model, shape, device_of(spec))
    replicas = autoscaling.min_replicas if autoscaling else spec.replicas
    return SizedService(service, sized, request, sized.plan, scale_policy(service, sized), replicas)


def _shape(model: ModelSource) -> ModelShape:
    if model.shape is None:
        raise ManifestError(
            f"the figures of {model.uri} are not in the manifest: set spec.model.shape, or give --model with a folder"
            " or URI that can be read from here"
        )
    try:
        return ModelShape.from_fields(model.shape.model_dump(by_alias=True))
    except ShapeError as error:
        raise ManifestError(f"spec.model.shape: {error}") from error


def _parse(manifest: Mapping[str, Any]) -> LLMService:
    if manifest.get("kind") != KIND:
        raise ManifestError(f"kind is {manifest.get('kind')!r}, expected {KIND}: give the manifest of one service")
    metadata = {"namespace": "default", "uid": "simulated", **(manifest.get("metadata") or {})}
    try:
        return LLMService.model_validate({"metadata": metadata, "spec": manifest.get("spec") or {}})
    except ValidationError as error:
        fields = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False))
        raise ManifestError(f"correct the manifest: {'; '.join(fields)}") from error
