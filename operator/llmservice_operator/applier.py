"""Make children what they should be: server-side apply where something changed, hands off what belongs to others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmservice_operator.kube_client import KubeClient
from llmservice_operator.spec import Manifest

_RESYNC_S = 60.0
"""Children are applied at least this often: it repairs drift that no watch event told of."""

ChildKey = tuple[str, str, str]
"""Kind, namespace, name."""


class ConflictError(Exception):
    """A child's name is taken by an object that is not this service's."""


@dataclass(frozen=True, slots=True)
class _Applied:
    manifest: Manifest
    time_s: float


class Applier:
    """Applies children, and remembers which are as they should be until somebody touches them."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._applied: dict[ChildKey, _Applied] = {}

    async def apply(self, children: Iterable[Manifest], owner_uid: str, now: float) -> None:
        """Apply what is new, changed, touched or long unseen; raises ConflictError, KubeError."""
        for child in children:
            key = _key(child)
            applied = self._applied.get(key)
            if applied and applied.manifest == child and now - applied.time_s < _RESYNC_S:
                continue
            await self._refuse_foreign(child, owner_uid)
            await self._client.apply(child)
            self._applied[key] = _Applied(child, now)

    async def remove(self, api_version: str, key: ChildKey, owner_uid: str) -> None:
        """Delete a child that is no longer asked for, if it is there and ours."""
        kind, namespace, name = key
        present = await self._client.get_child(api_version, kind, namespace, name)
        if present is not None and owned_by(present, owner_uid):
            await self._client.delete_child(api_version, kind, namespace, name)
        self._applied.pop(key, None)

    def touched(self, key: ChildKey) -> None:
        """Somebody changed this child: look at it again in the next pass."""
        self._applied.pop(key, None)

    async def _refuse_foreign(self, child: Manifest, owner_uid: str) -> None:
        kind, namespace, name = _key(child)
        present = await self._client.get_child(child["apiVersion"], kind, namespace, name)
        if present is not None and not owned_by(present, owner_uid):
            raise ConflictError(
                f"a {kind} called {name} is there already and belongs to something else:"
                " rename this service, or delete that object"
            )


def owned_by(manifest: Manifest, owner_uid: str) -> bool:
    references = manifest["metadata"].get("ownerReferences") or []
    return any(reference.get("uid") == owner_uid for reference in references)


def _key(child: Manifest) -> ChildKey:
    return (child["kind"], child["metadata"]["namespace"], child["metadata"]["name"])
