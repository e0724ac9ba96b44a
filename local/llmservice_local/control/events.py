"""Posting Events, those of one kind about one object folded into one with a count."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from llmservice_local.api.errors import ApiError
from llmservice_local.client import EVENTS, KubeClient

Object = dict[str, Any]
_LOG = logging.getLogger(__name__)


class Recorder:
    """Posts events in the name of one component. Losing one is logged, never raised: events are for people."""

    def __init__(self, client: KubeClient, component: str, host: str = "") -> None:
        self._client = client
        self._source = {"component": component} | ({"host": host} if host else {})
        self._posted: dict[tuple[str, str, str], Object] = {}

    async def post(self, about: Mapping[str, Any], kind: str, reason: str, message: str) -> None:
        """Post an event of `kind` Normal or Warning about an object; a repetition raises the count of the first."""
        metadata = about["metadata"]
        key = (metadata["uid"], reason, message)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            if (known := self._posted.get(key)) is not None:
                patch = {"count": known["count"] + 1, "lastTimestamp": now}
                self._posted[key] = await self._client.merge(EVENTS, known, patch)
                return
            namespace = metadata.get("namespace") or "default"
            event = {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{metadata['name']}.{time.time_ns():x}", "namespace": namespace},
                "involvedObject": {
                    "apiVersion": about.get("apiVersion"),
                    "kind": about.get("kind"),
                    "name": metadata["name"],
                    "namespace": metadata.get("namespace"),
                    "uid": metadata["uid"],
                },
                "type": kind,
                "reason": reason,
                "message": message,
                "source": self._source,
                "reportingComponent": self._source["component"],
                "count": 1,
                "firstTimestamp": now,
                "lastTimestamp": now,
            }
            self._posted[key] = await self._client.create(EVENTS, namespace, event)
        except ApiError as error:
            self._posted.pop(key, None)
            _LOG.debug("event %s about %s is lost: %s", reason, metadata["name"], error)
