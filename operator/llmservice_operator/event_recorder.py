"""Posting Events: what is told again within minutes raises the count of the Event that told it first."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from llmservice_operator.kube_client import KubeClient, KubeError
from llmservice_operator.spec import Manifest

logger = logging.getLogger(__name__)

_FOLD_S = 600.0
_REMEMBERED = 1024

_Key = tuple[str, str, str]
"""Uid of the service, reason, message."""


class EventRecorder:
    """Posts Events. One that is lost is logged and never raised: Events are for people, passes are not repeated."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._posted: dict[_Key, tuple[float, Manifest]] = {}

    async def post(self, events: Iterable[Manifest], now: float) -> None:
        for event in events:
            logger.info("%s/%s: %s", event["metadata"]["namespace"], event["involvedObject"]["name"], event["message"])
            try:
                await self._post(event, now)
            except KubeError as error:
                logger.warning("event not posted: %s", error)

    async def _post(self, event: Manifest, now: float) -> None:
        key = (event["involvedObject"]["uid"], event["reason"], event["message"])
        since, known = self._posted.pop(key, (0.0, None))
        if known is not None and 0 <= now - since < _FOLD_S:
            folded = {"count": known["count"] + 1, "lastTimestamp": event["lastTimestamp"]}
            if await self._client.patch_event(known["metadata"]["namespace"], known["metadata"]["name"], folded):
                self._remember(key, since, {**known, **folded})
                return
        await self._client.create_event(event)
        self._remember(key, now, event)

    def _remember(self, key: _Key, since: float, event: Manifest) -> None:
        self._posted[key] = (since, event)
        if len(self._posted) > _REMEMBERED:
            del self._posted[next(iter(self._posted))]
