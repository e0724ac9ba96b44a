"""Why the API server would not let an object be created, in a word that people look for."""

from __future__ import annotations

from typing import Any

from llmservice_operator.pods.pod import Trouble

_QUOTA = ("exceeded quota", "must specify requests", "must specify limits")
_ADMISSION = ("admission webhook", "violates PodSecurity", "ValidatingAdmissionPolicy", "denied the request")


def denial_reason(message: str, otherwise: str) -> str:
    """QuotaExceeded, AdmissionDenied, or `otherwise`, from what the API server said."""
    if any(words in message for words in _QUOTA):
        return "QuotaExceeded"
    if any(words in message for words in _ADMISSION):
        return "AdmissionDenied"
    return otherwise


def pods_denied(deployment: dict[str, Any] | None) -> Trouble | None:
    """What keeps Kubernetes from creating a Deployment's pods, as its ReplicaFailure condition tells it."""
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or []
    failure = next((one for one in conditions if one["type"] == "ReplicaFailure" and one["status"] == "True"), None)
    if failure is None:
        return None
    message = str(failure.get("message") or "the pods can't be created")
    return Trouble(denial_reason(message, "FailedCreate"), message)
