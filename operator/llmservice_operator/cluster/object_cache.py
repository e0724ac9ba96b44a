"""The cluster as the operator last saw it: what watches and resyncs brought, and the answers to its own writes.

A pass reads from here and sends no read requests. Its own writes are visible at once: the answer to a write is put
here, and the watch event of the same write brings nothing new.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from operator import is_
from typing import Any

from llmservice_operator.api import labels
from llmservice_operator.api.kinds import ChildKey
from llmservice_operator.api.resource import KIND
from llmservice_operator.api.spec import Manifest

_NEWEST = str(2**63 - 1)
"""Higher than every resource version."""
_DELETED_KEPT = 4096
"""Deletions that are remembered, by uid and version, so that a late answer does not restore an object."""

_SHORT = 128
"""Characters of strings that are interned."""


class ObjectCache:
    """Objects by kind, namespace and name. Returned objects share parts with each other and must not be modified."""

    def __init__(self) -> None:
        self._objects: dict[ChildKey, Manifest] = {}
        self._pods: dict[tuple[str, str], dict[str, Manifest]] = {}
        self._names: dict[str, set[tuple[str, str, str]]] = {}
        """By served name: the services that claim it, as (creation time, namespace, name)."""
        self._services_in: Counter[str] = Counter()
        """By namespace."""
        self._deleted: dict[str, int] = {}
        self._kinds: dict[str, bool] = {}
        self.unread: set[tuple[str, str]] = set()
        """Kinds and namespaces that no list has brought yet: what is missing there may exist."""
        self._last: dict[str, Manifest] = {}
        """By kind: the object that was put last, with which the next one shares equal parts."""

    def __len__(self) -> int:
        return len(self._objects)

    def follows(self, kind: str) -> bool:
        """Whether the kind is watched: an object that is not cached does not exist, or lacks our labels."""
        return kind in self._kinds

    def lacks(self, kind: str) -> bool:
        """Whether the cluster does not serve this kind: its CRD is not installed."""
        return not self._kinds.get(kind, True)

    def is_read(self, namespace: str | None) -> bool:
        """Whether every kind of a namespace was listed."""
        return all(one != namespace for _, one in self.unread)

    def service(self, namespace: str, name: str) -> Manifest | None:
        return self._objects.get((KIND, namespace, name))

    def services(self) -> list[tuple[str, str]]:
        """Namespace and name; first those whose present spec no pass has processed yet: a user waits for them."""
        services = [(key[1:], manifest) for key, manifest in self._objects.items() if key[0] == KIND]
        return [key for key, manifest in sorted(services, key=lambda service: _is_observed(service[1]))]

    def child(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self._objects.get((kind, namespace, name))

    def pods(self, namespace: str, instance: str) -> list[Manifest]:
        """The pods that carry the labels of a service, by name."""
        return [pod for _, pod in sorted(self._pods.get((namespace, instance), {}).items())]

    def name_holder(self, served_name: str) -> str | None:
        """The namespace that the gateway routes a served name to.

        Its first part if that is a namespace with services, else that of the oldest service that claims it.
        """
        first, slash, _ = served_name.partition("/")
        if slash and self._services_in[first]:
            return first
        claims = self._names.get(served_name)
        return min(claims)[1] if claims else None

    def latest(self, kind: str, obj: Manifest) -> Manifest:
        """The cached state of an object, or `obj` where that is newer or nothing is cached."""
        known = self.child(kind, obj["metadata"]["namespace"], obj["metadata"]["name"])
        return obj if known is None or _newer(obj["metadata"], known["metadata"]) else known

    def put(self, kind: str, obj: Mapping[str, Any]) -> bool:
        """Keep this state of an object; False where it is known, older than the known one, or of a deleted object."""
        metadata = obj["metadata"]
        key = (kind, metadata["namespace"], metadata["name"])
        known = self._objects.get(key)
        if version(metadata) <= self._deleted.get(metadata.get("uid", ""), -1):
            return False
        if known is not None and not _newer(metadata, known["metadata"]):
            return False
        if known is not None:
            self._unindex(key, known)
        kept = _shared(_trimmed(kind, obj), self._last.get(kind))
        self._objects[key] = self._last[kind] = kept
        if kind == "Pod" and (instance := _instance(kept)):
            self._pods.setdefault((key[1], instance), {})[key[2]] = kept
        if kind == KIND:
            self._names.setdefault(_served_name(kept), set()).add(_claim(kept))
            self._services_in[key[1]] += 1
        return True

    def drop(self, kind: str, obj: Mapping[str, Any]) -> bool:
        """Remove an object that was deleted, or that lost the labels it is selected by (it may come back, changed).

        False where another object has its name now, or where a later state of it is known.
        """
        metadata = obj["metadata"]
        key = (kind, metadata["namespace"], metadata["name"])
        known = self._objects.get(key)
        if known is None or known["metadata"].get("uid") != metadata.get("uid"):
            self._remember_deleted(metadata)
            return False
        if version(metadata) < version(known["metadata"]):
            return False
        self._remember_deleted(metadata)
        self._unindex(key, known)
        del self._objects[key]
        return True

    def replace(
        self, kind: str, namespace: str | None, objects: Iterable[Mapping[str, Any]], resource_version: str
    ) -> list[Manifest]:
        """Replace a whole collection by the list at a resource version.

        Returns the differences: new, newer and vanished objects. Objects that are newer than the list stay.
        """
        self._kinds[kind] = True
        listed = {(kind, one["metadata"]["namespace"], one["metadata"]["name"]): one for one in objects}
        changed = [dict(one) for one in listed.values() if self.put(kind, one)]
        absent = [
            known
            for key, known in self._objects.items()
            if key[0] == kind and namespace in {None, key[1]} and key not in listed
        ]
        last = {"resourceVersion": resource_version}
        vanished = [one for one in absent if self.drop(kind, {"metadata": {**one["metadata"], **last}})]
        return changed + vanished

    def withdraw(self, kind: str) -> list[Manifest]:
        """The API server does not serve this kind, or no longer. Returns the objects that were cached."""
        vanished = self.replace(kind, None, [], _NEWEST)
        self._kinds[kind] = False
        return vanished

    def _remember_deleted(self, metadata: Mapping[str, Any]) -> None:
        if uid := metadata.get("uid"):
            self._deleted[uid] = version(metadata)
            if len(self._deleted) > _DELETED_KEPT:
                del self._deleted[next(iter(self._deleted))]

    def _unindex(self, key: ChildKey, known: Manifest) -> None:
        if key[0] == KIND:
            self._services_in[key[1]] -= 1
            claims = self._names[_served_name(known)]
            claims.discard(_claim(known))
            if not claims:
                del self._names[_served_name(known)]
        if key[0] != "Pod" or not (instance := _instance(known)):
            return
        pods = self._pods[key[1], instance]
        pods.pop(key[2], None)
        if not pods:
            del self._pods[key[1], instance]


def version(metadata: Mapping[str, Any]) -> int:
    """The resource version as a number that grows with every write, as guaranteed for every resource since 1.35.

    https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
    """
    text = str(metadata.get("resourceVersion", ""))
    return int(text) if text.isdigit() else 0


def _is_observed(service: Manifest) -> bool:
    status = service.get("status") or {}
    return bool(status.get("observedGeneration", 0) >= service["metadata"].get("generation", 1))


def _newer(metadata: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    return metadata.get("uid") != known.get("uid") or version(metadata) > version(known)


def _trimmed(kind: str, obj: Mapping[str, Any]) -> Manifest:
    """Without unused fields, which would be most of the operator's memory."""
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    kept: Manifest = {**obj, "metadata": metadata}
    if kind == "Pod":
        spec = obj.get("spec") or {}
        kept["spec"] = {key: spec[key] for key in ("nodeName",) if key in spec}
        containers = spec.get("containers") or []
        if ports := [{key: one[key] for key in ("name", "ports")} for one in containers if one.get("ports")]:
            kept["spec"]["containers"] = ports
    return kept


def _shared(value: Any, like: Any) -> Any:
    """The same value, with those parts of `like` that are equal: most are in a thousand services' objects."""
    kind = type(value)
    if kind is str and len(value) <= _SHORT:
        return sys.intern(value)
    if kind is dict:
        known = like if type(like) is dict else {}
        made = {sys.intern(key): _shared(one, known.get(key)) for key, one in value.items()}
        equal = made.keys() == known.keys() and all(map(is_, made.values(), map(known.get, made)))
        return known if equal else made
    if kind is list:
        others = like if type(like) is list else []
        items = [_shared(one, other) for one, other in zip_longest(value, others[: len(value)])]
        return others if len(items) == len(others) and all(map(is_, items, others)) else items
    return like if kind is type(like) and value == like else value


def _served_name(service: Mapping[str, Any]) -> str:
    model = (service.get("spec") or {}).get("model") or {}
    return str(model.get("servedName") or service["metadata"]["name"])


def _claim(service: Mapping[str, Any]) -> tuple[str, str, str]:
    metadata = service["metadata"]
    return (str(metadata.get("creationTimestamp", "")), metadata["namespace"], metadata["name"])


def _instance(obj: Mapping[str, Any]) -> str | None:
    """The service of a pod, by the labels of `status.selector`."""
    tags = obj["metadata"].get("labels") or {}
    return tags.get(labels.INSTANCE) if tags.get(labels.NAME) == labels.APP else None


_YOUNG, _YOUNG_ROUNDS, _MIDDLE_ROUNDS = 20_000, 20, 50
"""Python's own are 700, 10 and 10. While the cache fills, hardly any new object is garbage."""


def collect_seldom() -> None:
    """Collect garbage less often: with a thousand services collections took a third of the start-up time."""
    gc.set_threshold(_YOUNG, _YOUNG_ROUNDS, _MIDDLE_ROUNDS)


def freeze_heap() -> None:
    """Exclude all present objects from full collections.

    Each collection would stop the process, with a thousand services for 0.1 s and more. Excluded objects are still
    freed by their reference count; only cycles among them would stay.
    """
    gc.collect()
    gc.freeze()
