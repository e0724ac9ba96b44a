"""kopf's settings, each with its reason."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import kopf

from llmservice_operator.api.kinds import FOLLOWED
from llmservice_operator.cluster.kube_client import PAGE, REQUEST_TIMEOUT_S, WATCH_S
from llmservice_operator.settings import OperatorSettings

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 10.0
_RELIST_PAUSE_S = 0.5


class EndlessBackoff:
    """Pauses in seconds between attempts at one request, without end."""

    def __iter__(self) -> Iterator[float]:
        pause_s = _FIRST_BACKOFF_S
        while True:
            yield pause_s * random.uniform(0.75, 1.0)  # noqa: S311 - no secret
            pause_s = min(2 * pause_s, _LONGEST_BACKOFF_S)


def kopf_settings(settings: OperatorSettings) -> kopf.OperatorSettings:
    """kopf's settings, for ours."""
    own = kopf.OperatorSettings()
    own.peering.standalone = True  # peering freezes operators of equal priority for a minute: the Lease decides
    own.posting.enabled = False  # kopf would post every log line as an Event
    own.persistence.diffbase_storage = NoDiffBase()
    own.persistence.progress_storage = NoProgress()
    own.queueing.idle_timeout = 0.2  # kopf has a task for each object: end it once its events are handled
    own.queueing.exit_timeout = 0.5
    own.networking.request_timeout = own.networking.connect_timeout = REQUEST_TIMEOUT_S
    own.networking.error_backoffs = EndlessBackoff()
    # kopf would watch every CRD of the cluster: Resync looks for the few that may be missing.
    own.scanning.disabled = True
    own.watching.chunk_size = PAGE
    own.watching.server_timeout = WATCH_S
    own.watching.inactivity_timeout = settings.watch_silence_s
    own.watching.reconnect_backoff = _RELIST_PAUSE_S
    for followed in FOLLOWED:
        if followed.selector:
            kind = followed.kind
            own.watching.label_selectors[kind.group, kind.version, kind.plural] = followed.selector
    return own


def quieten_kopf() -> None:
    """Suppress what kopf logs at each attempt and each discovery: `Watches` logs each reason once."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)  # of /healthz
    logging.getLogger("kopf._cogs.clients").setLevel(logging.CRITICAL)
    logging.getLogger("kopf._core.reactor.observation").setLevel(logging.ERROR)


class NoDiffBase(kopf.DiffBaseStorage):
    """No last-handled state; the default copies and compares the object at each event."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is written."""


class NoProgress(kopf.ProgressStorage):
    """No progress of handlers: `on.event` handlers are not retried."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is written."""

    def purge(self, **_: Any) -> None:
        """Nothing was written."""

    def touch(self, **_: Any) -> None:
        """Nothing is written."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
