"""What service accounts asked of the emulated API, as lines of the shape that kube-apiserver's audit log has."""

from __future__ import annotations

import json
from pathlib import Path

from llmservice_local.api.access import Account
from llmservice_local.api.errors import ApiError


class AuditLog:
    """Appends a line when it is decided whether a request may pass; bodies and tokens are never in it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def note(self, account: Account, verb: str, uri: str, refusal: ApiError | None) -> None:
        event = {
            "kind": "Event",
            "apiVersion": "audit.k8s.io/v1",
            "level": "Metadata",
            "verb": verb,
            "user": {"username": account.user},
            "requestURI": uri,
            "responseStatus": {} if refusal is None else {"code": refusal.code, "message": str(refusal)},
        }
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
