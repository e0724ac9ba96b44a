"""Posting Events: what is told again within minutes raises the count of the Event that told it first."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.kube_client import KubeClient, KubeError

logger = logging.getLogger(__name__)

_FOLD_S = 600.0
_REMEMBERED = 1024
_WAITING = 32
"""Events of one service that wait for an API server that takes none."""

_Key = tuple[str, str, str]
"""Uid of the service, reason, message."""


class EventRecorder:
    """Posts Events, and never raises: Events are for people, no pass is repeated for one.

    What the API server could not take just now is posted with the service's next Events, or in its next pass.
    """

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._posted: dict[_Key, tuple[float, Manifest]] = {}
        self._waiting: dict[tuple[str, str], list[Manifest]] = {}

    async def post(self, namespace: str, name: str, events: Iterable[Manifest], now: float) -> None:
        """Post what waits, then the new Events of this service."""
        for event in [*self._waiting.pop((namespace, name), []), *events]:
            logger.info("%s/%s: %s", namespace, name, event["message"])
            try:
                await self._post(event, now)
            except KubeError as error:
                logger.warning("event not posted: %s", error)
                waiting = self._waiting.setdefault((namespace, name), [])
                if error.passes and len(waiting) < _WAITING:
                    waiting.append(event)

    def forget(self, namespace: str, name: str) -> None:
        """Drop what waits for a service that is gone."""
        self._waiting.pop((namespace, name), None)

    async def _post(self, event: Manifest, now: float) -> None:
        key = (event["involvedObject"]["uid"], event["reason"], event["message"])
        since, known = self._posted.pop(key, (0.0, None))
        if known is not None and 0 <= now - since < _FOLD_S:
            folded = {"count": known["count"] + 1, "lastTimestamp": event["lastTimestamp"]}
            if await self._client.patch_event(known["metadata"]["namespace"], known["metadata"]["name"], folded):
                self._remember(key, since, {**known, **folded})
                return
        try:
            await self._client.create_event(event)
        except KubeError as error:
            if error.reason != "AlreadyExists":  # else it had arrived, and only the answer was lost
                raise
        self._remember(key, now, event)

    def _remember(self, key: _Key, since: float, event: Manifest) -> None:
        self._posted[key] = (since, event)
        if len(self._posted) > _REMEMBERED:
            del self._posted[next(iter(self._posted))]
