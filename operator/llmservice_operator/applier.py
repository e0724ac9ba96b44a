"""Make children what they should be: server-side apply where something changed, hands off what belongs to others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmservice_operator import labels
from llmservice_operator.child import Child, ChildKey
from llmservice_operator.kube_client import KubeClient, KubeError
from llmservice_operator.pod import Trouble
from llmservice_operator.resource import KIND
from llmservice_operator.spec import Manifest

_RESYNC_S = 60.0
"""Children are applied at least this often: it repairs drift that no watch event told of."""

_REFUSED = frozenset({400, 403, 409, 422})
"""Answers that the same request would get again: they are told to the user instead of being retried at once."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A child that could not be made what it should be, and why."""

    kind: str
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class _Known:
    child: Child
    time_s: float

    def holds(self, child: Child, now: float) -> bool:
        """Nothing to do: it is as it should be. What was found absent stays so until an event tells otherwise."""
        return self.child == child and (not child.wanted or now - self.time_s < _RESYNC_S)


class Applier:
    """Applies and removes children, and remembers which are as they should be until somebody touches them."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._known: dict[ChildKey, _Known] = {}

    async def apply(self, children: Iterable[Child], owner_uid: str, now: float) -> list[Refusal]:
        """Bring every child to where it should be; one that is refused holds up no other. Raises KubeError."""
        refusals: list[Refusal] = []
        for child in children:
            known = self._known.get(child.key)
            if known and known.holds(child, now):
                continue
            try:
                trouble = await (self._keep if child.wanted else self._remove)(child, owner_uid)
            except KubeError as error:
                if error.status not in _REFUSED:
                    raise
                trouble = Trouble("ApplyFailed", str(error))
            if trouble is None:
                self._known[child.key] = _Known(child, now)
            else:
                refusals.append(Refusal(child.kind.name, trouble))
        return refusals

    def touched(self, key: ChildKey) -> None:
        """Somebody changed this child: look at it again in the next pass."""
        self._known.pop(key, None)

    def forget(self, namespace: str, service: str) -> None:
        """Drop what is remembered of the children of a service that is gone."""
        for key, known in list(self._known.items()):
            if key[1] == namespace and known.child.manifest["metadata"]["labels"][labels.INSTANCE] == service:
                del self._known[key]

    async def _keep(self, child: Child, owner_uid: str) -> Trouble | None:
        present = await self._client.get_child(child.kind, *child.key[1:])
        if present is not None and not owned_by(present, owner_uid):
            return _name_taken(child, present)
        try:
            # Where nothing is there nothing can be in the way: a conflict means that somebody was faster.
            await self._client.apply(child.kind, child.manifest, force=present is not None)
        except KubeError as error:
            if error.status != 404 or child.kind.built_in:
                raise
        return None

    async def _remove(self, child: Child, owner_uid: str) -> None:
        present = await self._client.get_child(child.kind, *child.key[1:])
        if present is not None and owned_by(present, owner_uid):
            await self._client.delete_child(child.kind, *child.key[1:], uid=present["metadata"]["uid"])


def owned_by(manifest: Manifest, owner_uid: str) -> bool:
    return any(reference.get("uid") == owner_uid for reference in _owners(manifest))


def _name_taken(child: Child, present: Manifest) -> Trouble:
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
