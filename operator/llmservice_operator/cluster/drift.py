"""Whether live children are in sync with the expected ones: comparisons of data, so that only changes are written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmservice_operator.api import labels, units
from llmservice_operator.api.kinds import Child, ChildKey
from llmservice_operator.api.resource import GROUP
from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.object_cache import ObjectCache, version
from llmservice_operator.sizing import Sized

APPLIED = f"{GROUP}/applied"
"""Annotation of every child: the digest of what was last applied. It shows that a field is no longer expected."""

_BOOKKEEPING = frozenset({"resourceVersion", "generation", "managedFields", "uid", "creationTimestamp"})


@dataclass(frozen=True, slots=True)
class Settled:
    """A child that was in sync: what was expected, and what the API server made of it."""

    expected: str
    """The digest: the manifests of a thousand services would be a large part of the operator's memory."""
    resource_version: int
    fingerprint: str
    service: str
    """The service that it belongs to."""


def settled(expected: Manifest, live: Manifest) -> Settled:
    service = expected["metadata"]["labels"][labels.INSTANCE]
    return Settled(digest(expected), version(live["metadata"]), fingerprint(live), service)


def reason_to_apply(expected: Manifest, live: Manifest, known: Settled | None) -> str | None:
    """Why a child must be applied; None where it is in sync.

    With `known`, `live` is compared with the state that was in sync then, so that whatever the API server had defaulted
    or normalised is no difference. After a restart the fields themselves are compared.
    """
    if known is not None:
        if known.expected != digest(expected):
            return "changed"
        same = version(live["metadata"]) == known.resource_version or fingerprint(live) == known.fingerprint
        return None if same else "touched"
    if (live["metadata"].get("annotations") or {}).get(APPLIED) != digest(expected):
        return "changed"
    return None if covers(expected, live) else "touched"


def stamped(expected: Manifest) -> Manifest:
    """The child with its own digest, as it is applied."""
    metadata = expected["metadata"]
    annotations = {**(metadata.get("annotations") or {}), APPLIED: digest(expected)}
    return {**expected, "metadata": {**metadata, "annotations": annotations}}


def digest(expected: Any) -> str:
    text = json.dumps(expected, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(live: Manifest) -> str:
    """A digest of all that others may change, without status: states with the same fingerprint need the same writes."""
    metadata = {key: value for key, value in live["metadata"].items() if key not in _BOOKKEEPING}
    return digest({**{key: value for key, value in live.items() if key != "status"}, "metadata": metadata})


def covers(expected: Any, live: Any) -> bool:
    """Whether `live` has every field of `expected`. A field that the API server leaves out when empty may be missing.

    Lists must have the same length: one that others extended is applied once after a restart, which changes nothing.
    """
    if isinstance(expected, Mapping):
        if not isinstance(live, Mapping):
            return not expected and live is None
        return all(covers(value, live.get(key)) for key, value in expected.items())
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        found = live if isinstance(live, list) else []
        return len(expected) == len(found) and all(covers(*pair) for pair in zip(expected, found, strict=True))
    if live is None:
        return not expected
    return bool(expected == live) or _same_quantity(expected, live)


def _same_quantity(expected: Any, live: Any) -> bool:
    """The API server writes `1000m` as `1`."""
    try:
        return units.amount(str(expected)) == units.amount(str(live))
    except ValueError:
        return False


_KIND_MISSING = -1


@dataclass(frozen=True, slots=True)
class ChildInputs:
    """All that the children of a service are made from."""

    uid: str
    generation: int
    sized: Sized
    replicas: int
    public_keys: str | None = None
    """The gateway's, where it signs requests."""


class InSyncCache:
    """Services whose children are in sync: until an input or a child changes, they are neither made nor compared."""

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache
        self._in_sync: dict[tuple[str, str], tuple[ChildInputs, list[tuple[ChildKey, int | None]]]] = {}
        """With the version of each child in the cache; None: it neither exists nor should."""

    def __len__(self) -> int:
        return len(self._in_sync)

    def has(self, service: tuple[str, str], inputs: ChildInputs) -> bool:
        """Whether the children were in sync with these inputs, and none has changed since."""
        known, versions = self._in_sync.get(service, (None, []))
        return known == inputs and all(self._version(key) == known_version for key, known_version in versions)

    def add(self, service: tuple[str, str], inputs: ChildInputs, children: Sequence[Child]) -> None:
        """The children were just applied, and none was refused. Kinds without a watch are compared in every pass."""
        self.forget(service)
        if any(not self._cache.follows(child.kind.name) for child in children):
            return
        versions = [(child.key, self._version(child.key)) for child in children]
        pairs = zip(children, versions, strict=True)
        if all(known == _KIND_MISSING or child.wanted == (known is not None) for child, (_, known) in pairs):
            self._in_sync[service] = (inputs, versions)

    def forget(self, service: tuple[str, str]) -> None:
        self._in_sync.pop(service, None)

    def _version(self, key: ChildKey) -> int | None:
        """A kind that the cluster does not serve has no objects: its children neither exist nor are missing."""
        if self._cache.lacks(key[0]):
            return _KIND_MISSING
        live = self._cache.child(*key)
        return None if live is None else version(live["metadata"])
