"""The cluster as the operator last saw it: what watches and resyncs brought, and what its own writes were answered.

A pass reads from here and asks the API server for nothing. Reading one's own writes: the answer to a write is put here
at once, and the watch event that tells of the same write later brings nothing new.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from llmservice_operator.api import labels
from llmservice_operator.api.kinds import ChildKey
from llmservice_operator.api.resource import KIND
from llmservice_operator.api.spec import Manifest

_NEWEST = str(2**63 - 1)
"""A resource version that no object is younger than."""
_GRAVES = 4096
"""Deletions that are remembered by uid and version, so that an answer that comes late brings nothing back to life."""

_SHORT = 128
"""Characters of a string that is likely to be met again."""


class ObjectCache:
    """Objects by kind, namespace and name. What is handed out is never changed by anybody: replace, don't edit."""

    def __init__(self) -> None:
        self._objects: dict[ChildKey, Manifest] = {}
        self._pods: dict[tuple[str, str], dict[str, Manifest]] = {}
        self._names: dict[str, set[tuple[str, str, str]]] = {}
        """By served name: who claims it, as (creation time, namespace, name)."""
        self._services_in: Counter[str] = Counter()
        """By namespace."""
        self._graves: dict[str, int] = {}
        self._kinds: dict[str, bool] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def follows(self, kind: str) -> bool:
        """Whether an object of this kind that is not here does not exist (or carries no label of ours)."""
        return kind in self._kinds

    def lacks(self, kind: str) -> bool:
        """Whether the cluster does not know this kind: its CRD is not installed."""
        return not self._kinds.get(kind, True)

    def service(self, namespace: str, name: str) -> Manifest | None:
        return self._objects.get((KIND, namespace, name))

    def services(self) -> list[tuple[str, str]]:
        """Namespace and name; first those whose present spec nobody has taken up yet: somebody waits for them."""
        services = [(key[1:], manifest) for key, manifest in self._objects.items() if key[0] == KIND]
        return [key for key, manifest in sorted(services, key=lambda service: _is_taken_up(service[1]))]

    def child(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self._objects.get((kind, namespace, name))

    def pods(self, namespace: str, instance: str) -> list[Manifest]:
        """The pods that carry the labels of a service, by name."""
        return [pod for _, pod in sorted(self._pods.get((namespace, instance), {}).items())]

    def name_holder(self, served_name: str) -> str | None:
        """The namespace where the gateway looks for a served name: its first part if that is a namespace with
        services, else that of the oldest service that claims it."""
        first, slash, _ = served_name.partition("/")
        if slash and self._services_in[first]:
            return first
        claims = self._names.get(served_name)
        return min(claims)[1] if claims else None

    def put(self, kind: str, obj: Mapping[str, Any]) -> bool:
        """Keep this state of an object; False where it brings nothing new: known, older, or of one that was deleted."""
        metadata = obj["metadata"]
        key = (kind, metadata["namespace"], metadata["name"])
        known = self._objects.get(key)
        if version(metadata) <= self._graves.get(metadata.get("uid", ""), -1):
            return False
        if known is not None and not _newer(metadata, known["metadata"]):
            return False
        if known is not None:
            self._unindex(key, known)
        kept = _trimmed(kind, obj)
        self._objects[key] = kept
        if kind == "Pod" and (instance := _instance(kept)):
            self._pods.setdefault((key[1], instance), {})[key[2]] = kept
        if kind == KIND:
            self._names.setdefault(_served_name(kept), set()).add(_claim(kept))
            self._services_in[key[1]] += 1
        return True

    def drop(self, kind: str, obj: Mapping[str, Any]) -> bool:
        """Forget an object that was deleted, or that lost the labels it is selected by (it may come back, changed).

        False where another object lives under its name, or where this one was seen in a later state.
        """
        metadata = obj["metadata"]
        key = (kind, metadata["namespace"], metadata["name"])
        known = self._objects.get(key)
        if known is None or known["metadata"].get("uid") != metadata.get("uid"):
            self._bury(metadata)
            return False
        if version(metadata) < version(known["metadata"]):
            return False
        self._bury(metadata)
        self._unindex(key, known)
        del self._objects[key]
        return True

    def replace(
        self, kind: str, namespace: str | None, objects: Iterable[Mapping[str, Any]], resource_version: str
    ) -> list[Manifest]:
        """Take over a whole collection as listed at a resource version.

        Returns what differs from what was known: new, newer and vanished objects. What is younger than the list stays.
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
        """The API server does not serve this kind, or no longer: there is none of it. Returns what was known."""
        vanished = self.replace(kind, None, [], _NEWEST)
        self._kinds[kind] = False
        return vanished

    def _bury(self, metadata: Mapping[str, Any]) -> None:
        if uid := metadata.get("uid"):
            self._graves[uid] = version(metadata)
            if len(self._graves) > _GRAVES:
                del self._graves[next(iter(self._graves))]

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
    """The resource version as a number that grows with every write, as the API promises for every resource since 1.35.

    https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions
    """
    text = str(metadata.get("resourceVersion", ""))
    return int(text) if text.isdigit() else 0


def _is_taken_up(service: Manifest) -> bool:
    status = service.get("status") or {}
    return bool(status.get("observedGeneration", 0) >= service["metadata"].get("generation", 1))


def _newer(metadata: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    return metadata.get("uid") != known.get("uid") or version(metadata) > version(known)


def _trimmed(kind: str, obj: Mapping[str, Any]) -> Manifest:
    """Without what nobody reads: it is what the operator's memory would mostly consist of."""
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    kept: Manifest = {**obj, "metadata": metadata}
    if kind == "Pod":
        spec = obj.get("spec") or {}
        kept["spec"] = {key: spec[key] for key in ("nodeName",) if key in spec}
        containers = spec.get("containers") or []
        if ports := [{key: one[key] for key in ("name", "ports")} for one in containers if one.get("ports")]:
            kept["spec"]["containers"] = ports
    shared: Manifest = _shared(kept)
    return shared


def _shared(value: Any) -> Any:
    """The same with every short string kept once: most are the same in a thousand services' objects."""
    if type(value) is str:
        return sys.intern(value) if len(value) <= _SHORT else value
    if isinstance(value, Mapping):
        return {_shared(key): _shared(one) for key, one in value.items()}
    return [_shared(one) for one in value] if isinstance(value, list) else value


def _served_name(service: Mapping[str, Any]) -> str:
    model = (service.get("spec") or {}).get("model") or {}
    return str(model.get("servedName") or service["metadata"]["name"])


def _claim(service: Mapping[str, Any]) -> tuple[str, str, str]:
    metadata = service["metadata"]
    return (str(metadata.get("creationTimestamp", "")), metadata["namespace"], metadata["name"])


def _instance(obj: Mapping[str, Any]) -> str | None:
    """The service whose pod this is: by the labels that `status.selector` and the Deployment select on."""
    tags = obj["metadata"].get("labels") or {}
    return tags.get(labels.INSTANCE) if tags.get(labels.NAME) == labels.APP else None
