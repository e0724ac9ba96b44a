"""Applies the children of services: server-side apply where something differs; objects of others are left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmservice_operator.api import labels
from llmservice_operator.api.kinds import Child, ChildKey
from llmservice_operator.api.resource import KIND
from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.drift import Settled, digest, reason_to_apply, settled, stamped
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache, version
from llmservice_operator.pods.pod import Trouble

_REFUSED = frozenset({400, 403, 422})
"""The same request would get the same answer: it is reported in the status instead of being retried at once."""
_NOT_TYPED = ("failed to create typed patch object", "failed to convert new object")
"""The API server answers an apply with unknown fields, duplicate keys, or values of a wrong type or format (quantities)
with status 500 and these messages."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 5.0, 300.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A child that could not be applied, and why."""

    kind: str
    trouble: Trouble


class Applier:
    """Applies and removes children, and writes nothing where the cache shows them in sync."""

    def __init__(self, client: KubeClient, cache: ObjectCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._cache = cache
        self._backoff = RefusalBackoff(clock)
        self._settled: dict[ChildKey, Settled] = {}

    def __len__(self) -> int:
        return len(self._settled)

    async def apply(self, children: Iterable[Child], owner_uid: str, generation: int = 1) -> list[Refusal]:
        """Apply every child; one that is refused does not hold up the others. Raises KubeError.

        `generation` is the service's: after an edit of the spec a refused child is tried again at once, even where the
        edit does not change the child.
        """
        refusals: list[Refusal] = []
        for child in children:
            if self._cache.lacks(child.kind.name):  # its CRD is missing
                continue
            trouble = self._backoff.pending(child, self._cache.child(*child.key), generation)
            if trouble is None:
                trouble = await self._sync(child, owner_uid, generation)
            if trouble is not None:
                refusals.append(Refusal(child.kind.name, trouble))
        return refusals

    def forget(self, namespace: str, service: str) -> None:
        """Drop all state about the children of a service that is gone."""
        for key, known in list(self._settled.items()):
            if key[1] == namespace and known.service == service:
                del self._settled[key]
        self._backoff.forget(namespace, service)

    async def _sync(self, child: Child, owner_uid: str, generation: int) -> Trouble | None:
        before = self._cache.child(*child.key)
        try:
            trouble = await (self._keep if child.wanted else self._remove)(child, owner_uid)
        except KubeError as error:
            if not _is_refusal(error):
                raise
            refused = Trouble("ApplyFailed", str(error))
            self._backoff.add(child, before, generation, refused)
            return refused
        self._backoff.clear(child.key)
        return trouble

    async def _keep(self, child: Child, owner_uid: str) -> Trouble | None:
        expected, known = child.manifest, self._settled.get(child.key)
        live = self._cache.child(*child.key) or await self._get(child)  # the cache has only objects with our labels
        if live is not None and not owned_by(live, owner_uid):
            return name_taken(child, live)
        if live is None or reason_to_apply(expected, live, known) is not None:
            try:
                live = await self._apply(child, live)
            except KubeError as error:
                if error.status == 404 and not child.kind.built_in:
                    return None
                if error.status != 409:
                    raise
                live = await self._get(child)  # another client was faster: look again, and try once more
                if live is not None and not owned_by(live, owner_uid):
                    return name_taken(child, live)
                live = await self._apply(child, live)
            self._cache.put(child.kind.name, live)
        if known is None or known.expected != digest(expected) or known.resource_version != version(live["metadata"]):
            self._settled[child.key] = settled(expected, live)
        return None

    async def _get(self, child: Child) -> Manifest | None:
        return await self._client.get_child(child.kind, *child.key[1:])

    async def _apply(self, child: Child, live: Manifest | None) -> Manifest:
        """Without `live` there is nothing to take over: a conflict means that another client was faster."""
        return await self._client.apply(child.kind, stamped(child.manifest), force=live is not None)

    async def _remove(self, child: Child, owner_uid: str) -> None:
        self._settled.pop(child.key, None)
        present = self._cache.child(*child.key)
        if present is None and not self._cache.follows(child.kind.name):
            present = await self._get(child)
        if present is not None and owned_by(present, owner_uid):
            await self._client.delete_child(child.kind, *child.key[1:], uid=present["metadata"]["uid"])


def _is_refusal(error: KubeError) -> bool:
    return error.status in _REFUSED or (error.status == 500 and any(words in str(error) for words in _NOT_TYPED))


def owned_by(manifest: Manifest, owner_uid: str) -> bool:
    return any(reference.get("uid") == owner_uid for reference in _owners(manifest))


def name_taken(child: Child, present: Manifest) -> Trouble:
    """Why a child can't be applied where an object of its name belongs to another owner."""
    kind, _, name = child.key
    (ours,) = _owners(child.manifest)
    if any((other.get("kind"), other.get("name")) == (KIND, ours["name"]) for other in _owners(present)):
        return Trouble("Replacing", f"the {kind} {name} of a deleted service of that name is still being removed")
    return Trouble(
        "NameConflict",
        f"a {kind} called {name} is there already and belongs to something else:"
        " rename this service, or delete that object",
    )


def _owners(manifest: Manifest) -> list[Manifest]:
    return manifest["metadata"].get("ownerReferences") or []


Attempt = tuple[int, bool, str, int]
"""The service's generation, whether the child is wanted, its digest, and the version of the live object. A different
attempt has not been refused."""


@dataclass(frozen=True, slots=True)
class _Refused:
    attempt: Attempt
    service: str
    trouble: Trouble
    wait_s: float
    until_s: float


class RefusalBackoff:
    """Exponential backoff, by child, of requests that the API server refused; it ends when the attempt differs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[ChildKey, _Refused] = {}

    def __len__(self) -> int:
        return len(self._refused)

    def pending(self, child: Child, live: Manifest | None, generation: int) -> Trouble | None:
        """The last refusal, until it is time for the next attempt; else None."""
        known = self._refused.get(child.key)
        if known is None or self._clock() >= known.until_s:
            return None
        return known.trouble if known.attempt == _attempt(child, live, generation) else None

    def add(self, child: Child, live: Manifest | None, generation: int, trouble: Trouble) -> None:
        """`live` is what the cache had when the request was sent."""
        attempt = _attempt(child, live, generation)
        known = self._refused.get(child.key)
        again = known is not None and known.attempt == attempt
        wait_s = min(known.wait_s * 2, _LONGEST_WAIT_S) if known is not None and again else _FIRST_WAIT_S
        service = child.manifest["metadata"]["labels"][labels.INSTANCE]
        self._refused[child.key] = _Refused(attempt, service, trouble, wait_s, self._clock() + wait_s)

    def clear(self, key: ChildKey) -> None:
        """The child was applied."""
        self._refused.pop(key, None)

    def forget(self, namespace: str, service: str) -> None:
        for key in [key for key, one in self._refused.items() if (key[1], one.service) == (namespace, service)]:
            del self._refused[key]


def _attempt(child: Child, live: Manifest | None, generation: int) -> Attempt:
    return generation, child.wanted, digest(child.manifest), version(live["metadata"]) if live is not None else -1
