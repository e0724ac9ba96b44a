"""Errors of the API: a Kubernetes `Status` with the reasons and messages of a real API server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class ApiError(Exception):
    """An error with an HTTP code and a Kubernetes reason; `status()` is the body, `warnings` become headers."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Mapping[str, Any] | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.details = dict(details or {})
        self.warnings = tuple(warnings)

    def status(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }
        if self.details:
            body["details"] = self.details
        return body


@dataclass(frozen=True, slots=True)
class FieldError:
    """One error of one field in Kubernetes' format: `spec.replicas: Invalid value: -1: …`."""

    path: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}" if self.path else self.detail


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def not_found(plural: str, group: str, name: str) -> ApiError:
    resource = f"{plural}.{group}" if group else plural
    return ApiError(404, "NotFound", f'{resource} "{name}" not found', {"name": name, "group": group, "kind": plural})


def already_exists(plural: str, group: str, name: str) -> ApiError:
    resource = f"{plural}.{group}" if group else plural
    details = {"name": name, "group": group, "kind": plural}
    return ApiError(409, "AlreadyExists", f'{resource} "{name}" already exists', details)


def conflict(plural: str, group: str, name: str, why: str) -> ApiError:
    resource = f"{plural}.{group}" if group else plural
    message = f'Operation cannot be fulfilled on {resource} "{name}": {why}'
    return ApiError(409, "Conflict", message, {"name": name, "group": group, "kind": plural})


def invalid(kind: str, group: str, name: str, errors: Sequence[FieldError]) -> ApiError:
    """422 with the path and the reason of every invalid field."""
    listed = [str(error) for error in errors]
    why = listed[0] if len(listed) == 1 else "[" + ", ".join(listed) + "]"
    qualified = f"{kind}.{group}" if group else kind
    causes = [{"reason": error.reason, "message": error.detail, "field": error.path} for error in errors]
    details = {"name": name, "group": group, "kind": kind, "causes": causes}
    return ApiError(422, "Invalid", f'{qualified} "{name}" is invalid: {why}', details)


def denied(webhook: str, status: Mapping[str, Any], warnings: Sequence[str]) -> ApiError:
    """The denial of an admission webhook, with the `status` of its response."""
    reason = status.get("reason") or ""
    why = status.get("message") or reason
    message = f'admission webhook "{webhook}" denied the request{f": {why}" if why else " without explanation"}'
    return ApiError(max(400, status.get("code", 0)), reason, message, status.get("details"), warnings)


def gone(message: str) -> ApiError:
    return ApiError(410, "Expired", message)
