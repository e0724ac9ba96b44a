"""Make children what they should be: server-side apply where something differs, hands off what belongs to others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmservice_operator.api.kinds import ChildKey
from llmservice_operator.api.resource import KIND
from llmservice_operator.api.spec import Manifest
from llmservice_operator.apply.drift import Settled, digest, reason_to_apply, settled, stamped
from llmservice_operator.apply.refusals import Refusals
from llmservice_operator.children.child import Child
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache, version
from llmservice_operator.pods.pod import Trouble

_REFUSED = frozenset({400, 403, 422})
"""Answers that the same request would get again: they are told to the user instead of being retried at once."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A child that could not be made what it should be, and why."""

    kind: str
    trouble: Trouble


class Applier:
    """Applies and removes children, and writes nothing where the cache shows them as they should be."""

    def __init__(self, client: KubeClient, cache: ObjectCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._cache = cache
        self._refused = Refusals(clock)
        self._settled: dict[ChildKey, Settled] = {}

    def __len__(self) -> int:
        return len(self._settled)

    async def apply(self, children: Iterable[Child], owner_uid: str, generation: int = 1) -> list[Refusal]:
        """Bring every child to where it should be; one that is refused holds up no other. Raises KubeError.

        `generation` is the service's: whoever edited the spec wants to see what becomes of it, also where it changes
        nothing of a child that was refused.
        """
        refusals: list[Refusal] = []
        for child in children:
            if self._cache.lacks(child.kind.name):  # its CRD is missing: there is none, and none can be made
                continue
            trouble = self._refused.standing(child, self._cache.child(*child.key), generation)
            if trouble is None:
                trouble = await self._bring(child, owner_uid, generation)
            if trouble is not None:
                refusals.append(Refusal(child.kind.name, trouble))
        return refusals

    def forget(self, namespace: str, service: str) -> None:
        """Drop what is remembered of the children of a service that is gone."""
        for key, known in list(self._settled.items()):
            if key[1] == namespace and known.service == service:
                del self._settled[key]
        self._refused.forget(namespace, service)

    async def _bring(self, child: Child, owner_uid: str, generation: int) -> Trouble | None:
        before = self._cache.child(*child.key)
        try:
            trouble = await (self._keep if child.wanted else self._remove)(child, owner_uid)
        except KubeError as error:
            if error.status not in _REFUSED:
                raise
            refused = Trouble("ApplyFailed", str(error))
            self._refused.add(child, before, generation, refused)
            return refused
        self._refused.settle(child.key)
        return trouble

    async def _keep(self, child: Child, owner_uid: str) -> Trouble | None:
        expected, known = child.manifest, self._settled.get(child.key)
        live = self._cache.child(*child.key) or await self._present(child)  # one without our labels may be there
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
                live = await self._present(child)  # somebody was faster: look again, and try once more
                if live is not None and not owned_by(live, owner_uid):
                    return name_taken(child, live)
                live = await self._apply(child, live)
            self._cache.put(child.kind.name, live)
        if known is None or known.expected != digest(expected) or known.resource_version != version(live["metadata"]):
            self._settled[child.key] = settled(expected, live)
        return None

    async def _present(self, child: Child) -> Manifest | None:
        return await self._client.get_child(child.kind, *child.key[1:])

    async def _apply(self, child: Child, live: Manifest | None) -> Manifest:
        """Where nothing is there nothing can be in the way: a conflict means that somebody was faster."""
        return await self._client.apply(child.kind, stamped(child.manifest), force=live is not None)

    async def _remove(self, child: Child, owner_uid: str) -> None:
        self._settled.pop(child.key, None)
        present = self._cache.child(*child.key)
        if present is None and not self._cache.follows(child.kind.name):
            present = await self._present(child)
        if present is not None and owned_by(present, owner_uid):
            await self._client.delete_child(child.kind, *child.key[1:], uid=present["metadata"]["uid"])


def owned_by(manifest: Manifest, owner_uid: str) -> bool:
    return any(reference.get("uid") == owner_uid for reference in _owners(manifest))


def name_taken(child: Child, present: Manifest) -> Trouble:
    """Why a child can't be made where an object of its name is not its service's."""
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
