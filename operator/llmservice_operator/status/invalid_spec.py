"""A spec that the API server took and the operator can't read: written under another version of the CRD."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from llmservice_operator.api.spec import Manifest
from llmservice_operator.api.status import LLMServiceStatus
from llmservice_operator.status.conditions import (
    PROGRESSING,
    READY,
    SCALING_ACTIVE,
    SIZING_VALID,
    SLO_FEASIBLE,
    STALLED,
    Verdict,
    conditions,
)
from llmservice_operator.status.merge_patch import merge_patch

REASON = "InvalidSpec"


class InvalidSpecError(Exception):
    """The message names each field and what was expected of it."""

    def __init__(self, manifest: Manifest, error: ValidationError) -> None:
        fields = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False))
        super().__init__("; ".join(fields))
        self.manifest = manifest


def invalid_spec_patch(error: InvalidSpecError, now: float) -> dict[str, Any]:
    """What to change in the status; empty where it says so already. What runs is left alone, and its figures stay."""
    raw = error.manifest.get("status") or {}
    try:
        before = LLMServiceStatus.model_validate(raw).conditions
    except ValidationError:
        before = []
    message = f"the spec does not fit this operator's CRD, correct it: {error}"
    verdicts = [Verdict(kind, "False", REASON, message) for kind in (READY, PROGRESSING, SIZING_VALID)]
    verdicts.append(Verdict(STALLED, "True", REASON, message))
    verdicts += [Verdict(kind, "Unknown", REASON, "the spec comes first") for kind in (SCALING_ACTIVE, SLO_FEASIBLE)]
    generation = int(error.manifest["metadata"].get("generation", 1))
    after = [one.model_dump(by_alias=True) for one in conditions(before, verdicts, generation, now)]
    return merge_patch(
        {key: raw.get(key) for key in ("observedGeneration", "conditions")},
        {"observedGeneration": generation, "conditions": after},
    )
