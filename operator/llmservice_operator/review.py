"""Reviews a spec before it is stored, with the checks of a pass that need neither pods nor children of its own.

A denial has the words that `SizingValid` or `Ready` would have; a pass reports the same where no webhook is called.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pydantic import ValidationError

from llmservice_operator.api.kinds import Child
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest, Slo
from llmservice_operator.children.expected import expected_children
from llmservice_operator.cluster.applier import name_taken, owned_by
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.grants import Grants
from llmservice_operator.locations import ModelSourceError
from llmservice_operator.scaling.feasibility import feasibility_of
from llmservice_operator.sizing import ReadModel, Sized, SizingProblem, size
from llmservice_operator.status.conditions import READY, SIZING_VALID, SLO_FEASIBLE
from llmservice_operator.status.model_status import known_figures
from llmservice_operator.status.report import InvalidSpecError

_SIZED = frozenset({"model", "workload", "resources", "engine", "slo", "adapters"})
"""The parts of a spec that decide whether it fits."""
_GRANTED = frozenset({"model", "podTemplate"})
"""The parts that may name what the platform has to grant."""
_REVIEWED = _SIZED | _GRANTED
_NEVER_SERVED = frozenset({"InvalidURI", "FileModelsDisabled"})
"""Reasons why a model can never be read."""
_READ_S = 2.0
"""For the model's config.json; `kubectl apply` waits for it."""


@dataclass(frozen=True, slots=True)
class Review:
    """Denied for a reason, or allowed, with warnings."""

    denied: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reviewer:
    """Reviews specs by the same functions as a pass."""

    client: KubeClient
    read_model: ReadModel
    server_image: str
    grants: Grants

    async def review(self, manifest: Manifest, before: Manifest | None) -> Review:
        """`before` is the previous manifest, None for a new object.

        Unchanged parts are not checked again, so that a spec that no longer fits can still be scaled down.
        """
        leaving = manifest["metadata"].get("deletionTimestamp") is not None
        changed = _changed(manifest, before)
        if leaving or not changed:
            return Review()
        try:
            service = LLMService.model_validate(_reviewable(manifest))
        except ValidationError as error:
            wrong = {part for one in error.errors() for part in one["loc"][1:2]}
            if changed & (_REVIEWED | wrong):
                return Review(f"InvalidSpec: {InvalidSpecError(manifest, error)}")
            return Review()
        if changed & _GRANTED and (refused := await self._refused(service)):
            return Review(f"{READY} would be False: {refused}")
        return await self._fit(service, new=before is None) if changed & _SIZED else Review()

    async def _fit(self, service: LLMService, *, new: bool) -> Review:
        sizing = await self._size(service)
        if isinstance(sizing, ModelSourceError):
            return Review(warnings=(f"{SIZING_VALID} is not known yet: {sizing.reason}: {sizing}",))
        if isinstance(sizing, SizingProblem):
            return Review(f"{SIZING_VALID} would be False: {sizing.reason}: {sizing.message}")
        if new and (taken := await self._taken(service, sizing)):
            return Review(f"{READY} would be False: {taken}")
        return Review(warnings=_warnings(service.spec.slo, sizing))

    async def _refused(self, service: LLMService) -> str | None:
        """Whether the spec names what the platform does not grant; where that can't be read, a pass decides."""
        try:
            trouble = await self.grants.refusal(service)
        except KubeError:
            return None
        return f"{trouble.reason}: {trouble.message}" if trouble else None

    async def _size(self, service: LLMService) -> Sized | SizingProblem | ModelSourceError:
        known = known_figures(service.status.model, service.spec.model)
        try:
            async with asyncio.timeout(_READ_S):
                model = await self.read_model(service.spec.model, known)
        except ModelSourceError as error:
            return SizingProblem(error.reason, str(error)) if error.reason in _NEVER_SERVED else error
        except TimeoutError:
            return ModelSourceError("ModelUnreachable", f"the model's figures were not read within {_READ_S:g} s")
        return size(service.spec, model)

    async def _taken(self, service: LLMService, sized: Sized) -> str | None:
        """The first name of a child that belongs to another object; names that can't be read are no conflict."""
        children = [one for one in expected_children(service, sized, 1, self.server_image) if one.wanted]
        reasons = await asyncio.gather(*map(self._conflict, children))
        return next((reason for reason in reasons if reason is not None), None)

    async def _conflict(self, child: Child) -> str | None:
        try:
            present = await self.client.get_child(child.kind, *child.key[1:])
        except KubeError:
            return None
        owner = child.manifest["metadata"]["ownerReferences"][0]["uid"]
        if present is None or owned_by(present, owner):
            return None
        trouble = name_taken(child, present)
        return f"{trouble.reason}: {trouble.message}" if trouble.reason == "NameConflict" else None


def _changed(manifest: Manifest, before: Manifest | None) -> frozenset[str]:
    """The parts of the spec that differ; also all that are reviewed where the object is new."""
    new, old = manifest.get("spec") or {}, (before or {}).get("spec") or {}
    different = frozenset(part for part in new.keys() | old.keys() if new.get(part) != old.get(part))
    return different if before is not None else different | _REVIEWED


def _warnings(slo: Slo, sized: Sized) -> tuple[str, ...]:
    found = feasibility_of(slo, sized, None, None)
    return () if found.replicas_help else (f"{SLO_FEASIBLE} will be False: {found.reason}: {found.message}",)


def _reviewable(manifest: Manifest) -> Manifest:
    """An object that is being created may have no uid yet; most of its status is not reviewed."""
    metadata = {"uid": "", **manifest["metadata"]}
    status = manifest.get("status") or {}
    return {**manifest, "metadata": metadata, "status": {key: status[key] for key in ("model",) if key in status}}
