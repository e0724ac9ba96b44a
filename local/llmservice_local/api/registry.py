"""The verbs of the API: create, update, patch, apply and delete, with defaulting, validation and preconditions."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from llmservice_local.api.store import Store
from llmservice_local.errors import ApiError, FieldError, already_exists, bad_request, conflict, invalid, not_found
from llmservice_local.kinds.apply import Manager, apply, owners_after_update, read_owners, typed, with_owners
from llmservice_local.kinds.builtin_rules import exceeded_quota
from llmservice_local.kinds.catalogue import Kind, Kinds, scale_of, scaled
from llmservice_local.kinds.crd import CLEANUP_FINALIZER, established, kinds_of
from llmservice_local.kinds.patch import json_patch, merge_patch, strategic_merge_patch
from llmservice_local.kinds.schema import with_quantities
from llmservice_local.kinds.strategy import (
    Strategy,
    carried_over,
    check_preconditions,
    event_from_core,
    event_to_core,
    grace_s,
    identified,
    is_removable,
    refuse_unknown,
    without,
)
from llmservice_local.objects import Object, timestamp, with_condition
from llmservice_local.selector import Predicate

APPLY_PATCH = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

_SUFFIX_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # the alphabet of generated pod names
_PERMANENT = {"default", "kube-system", "kube-public"}
_PROPAGATION_FINALIZERS = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The query parameters of a write."""

    manager: str = "unknown"
    force: bool = False
    field_validation: str = "Warn"
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class DeleteOptions:
    propagation: str = "Background"
    grace_period_s: int | None = None
    uid: str | None = None
    resource_version: str | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of a write, or of its dry run: the object as the API shows it, and warnings for the caller.

    `old` and `new` are the object in the store before and after the write; `old` is None for a creation.
    """

    obj: Object
    old: Object | None
    new: Object
    warnings: list[str] = field(default_factory=list)

    @property
    def created(self) -> bool:
        return self.old is None


def utc_now() -> datetime:
    return datetime.now(UTC)


def random_uid() -> str:
    return str(uuid.uuid4())


class Registry:
    """The objects of all kinds. Every verb is synchronous, and so a transaction of the one event loop."""

    def __init__(self, clock: Callable[[], datetime] = utc_now, new_uid: Callable[[], str] = random_uid) -> None:
        self.kinds = Kinds()
        self.store = Store()
        self._clock = clock
        self._new_uid = new_uid
        self._strategies: dict[tuple[str, str, str], Strategy] = {}
        self._next_cluster_ip = 10
        for name in ("default", "kube-system", "kube-public", "kube-node-lease"):
            self.create(self.kinds.find("", "v1", "namespaces"), "", {"metadata": {"name": name}}, WriteOptions())

    def strategy(self, kind: Kind) -> Strategy:
        key = (kind.group, kind.version, kind.plural)
        if key not in self._strategies:
            self._strategies[key] = Strategy(kind)
        return self._strategies[key]

    def present(self, kind: Kind, obj: Mapping[str, Any]) -> Object:
        """A stored object as the API of this kind returns it."""
        if kind.group == "events.k8s.io":
            return event_from_core(obj)
        return {**obj, "apiVersion": kind.api_version, "kind": kind.name}

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return self.present(kind, self._stored(kind, namespace, name))

    def select(
        self, kind: Kind, namespace: str | None, labels: Predicate | None = None, fields: Predicate | None = None
    ) -> list[Object]:
        """The objects that both selectors match, of all namespaces if `namespace` is None."""
        return [
            self.present(kind, obj)
            for obj in self.store.list(kind.collection, namespace)
            if (labels is None or labels(obj)) and (fields is None or fields(obj))
        ]

    def create(self, kind: Kind, namespace: str, obj: Object, options: WriteOptions) -> Written:
        """Create an object; raises `ApiError` 409 if the name exists, 422 if the object is invalid."""
        obj, warnings = self._decode(kind, namespace, "", obj, options)
        metadata = obj["metadata"]
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                why = FieldError(
                    "metadata.name", "FieldValueRequired", "Required value: name or generateName is required"
                )
                raise invalid(kind.name, kind.group, "", [why])
            suffix = "".join(secrets.choice(_SUFFIX_ALPHABET) for _ in range(5))
            metadata["name"] = metadata["generateName"][:58] + suffix
        if self.store.get(kind.collection, namespace, metadata["name"]) is not None:
            raise already_exists(kind.plural, kind.group, metadata["name"])
        self._check_namespace(kind, namespace)
        obj = self._new(kind, obj)
        manager = Manager(options.manager, "Update", kind.api_version)
        owners = owners_after_update(None, obj, self.strategy(kind).schema, {}, manager)
        return self._written(kind, None, with_owners(obj, owners, self.now()), options, warnings)

    def update(
        self, kind: Kind, namespace: str, name: str, obj: Object, options: WriteOptions, subresource: str = ""
    ) -> Written:
        """Replace an object (or its status, or its scale); a stale resourceVersion is a conflict."""
        old = self._stored(kind, namespace, name)
        if subresource == "scale":
            obj = scaled(kind, old, obj)
        obj, warnings = self._decode(kind, namespace, name, obj, options)
        if kind.custom and not obj["metadata"].get("resourceVersion"):
            why = "Invalid value: 0: must be specified for an update"
            errors = [FieldError("metadata.resourceVersion", "FieldValueInvalid", why)]
            raise invalid(kind.plural, kind.group, name, errors)
        return self._update(kind, old, obj, options, subresource, warnings)

    def patch(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        body: Any,
        content_type: str,
        options: WriteOptions,
        subresource: str = "",
    ) -> Written:
        """Patch an object with any of the four patch types; server-side apply creates a missing object."""
        if content_type == APPLY_PATCH:
            return self._apply(kind, namespace, name, body, options, subresource)
        old = self._stored(kind, namespace, name)
        target = scale_of(kind, old) if subresource == "scale" else self.present(kind, old)
        if content_type == JSON_PATCH:
            patched = json_patch(target, body)
        elif content_type == MERGE_PATCH:
            patched = merge_patch(target, body)
        elif content_type == STRATEGIC_PATCH and not kind.custom:
            patched = strategic_merge_patch(target, body, self.strategy(kind).schema)
        else:
            accepted = ", ".join([JSON_PATCH, MERGE_PATCH, APPLY_PATCH] + ([] if kind.custom else [STRATEGIC_PATCH]))
            message = f"the body of the request was in an unknown format - accepted media types include: {accepted}"
            raise ApiError(415, "UnsupportedMediaType", message)
        if subresource == "scale":
            patched = scaled(kind, old, patched)
        patched, warnings = self._decode(kind, namespace, name, patched, options)
        return self._update(kind, old, patched, options, subresource, warnings)

    def commit(self, kind: Kind, dry: Written) -> Written | None:
        """Store the result of a dry run; None if the object has been written or deleted since."""
        metadata = dry.new["metadata"]
        namespace = metadata.get("namespace", "")
        if self.store.get(kind.collection, namespace, metadata["name"]) is not dry.old:
            return None
        if dry.old is None:
            self._check_namespace(kind, namespace)
        return self._written(kind, dry.old, dry.new, WriteOptions(), dry.warnings)

    def delete(self, kind: Kind, namespace: str, name: str, options: DeleteOptions) -> tuple[Object, bool]:
        """Delete an object, or only mark it if it has finalizers or a grace period; returns (object, is removed)."""
        old = self._stored(kind, namespace, name)
        if kind.name == "Namespace" and name in _PERMANENT:
            raise ApiError(403, "Forbidden", f'namespaces "{name}" is forbidden: this namespace may not be deleted')
        check_preconditions(kind, old, options.uid, options.resource_version)
        if options.dry_run:
            return old, False
        metadata = dict(old["metadata"])
        if finalizer := _PROPAGATION_FINALIZERS.get(options.propagation):
            metadata["finalizers"] = sorted({*(metadata.get("finalizers") or []), finalizer})
        allowed_s = grace_s(kind, old, options.grace_period_s)
        marked: Object = {**old, "metadata": metadata}
        if "deletionTimestamp" not in metadata or allowed_s < metadata.get("deletionGracePeriodSeconds", 0):
            metadata["deletionTimestamp"] = timestamp(self._clock() + timedelta(seconds=allowed_s))
            metadata["deletionGracePeriodSeconds"] = allowed_s
            if self.strategy(kind).has_generation:
                metadata["generation"] = metadata.get("generation", 0) + 1
        if kind.name == "Namespace":
            marked["status"] = {**(old.get("status") or {}), "phase": "Terminating"}
        if kind.name == "CustomResourceDefinition":
            return self._delete_definition(kind, marked)
        if is_removable(kind, marked):
            return self._remove(kind, namespace, name), True
        return (self.store.put(kind.collection, marked) if marked != old else old), False

    def bind(self, namespace: str, name: str, binding: Mapping[str, Any]) -> None:
        """Assign a pod to a node by a Binding, as the scheduler does."""
        pods = self.kinds.find("", "v1", "pods")
        pod = self._stored(pods, namespace, name)
        node = (binding.get("target") or {}).get("name")
        if not node:
            raise bad_request("a Binding needs target.name, the name of the node")
        if pod["spec"].get("nodeName"):
            why = f'pod {name} is already assigned to node "{pod["spec"]["nodeName"]}"'
            raise conflict(pods.plural, "", name, why)
        status = with_condition(pod.get("status") or {}, {"type": "PodScheduled", "status": "True"}, self.now())
        self.store.put(pods.collection, {**pod, "spec": {**pod["spec"], "nodeName": node}, "status": status})

    # -- writing ---------------------------------------------------------------------------------------------------

    def _apply(
        self, kind: Kind, namespace: str, name: str, body: Any, options: WriteOptions, subresource: str
    ) -> Written:
        if not isinstance(body, dict):
            raise bad_request("an apply patch is an object")
        if (body.get("metadata") or {}).get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        live = self.store.get(kind.collection, namespace, name)
        if live is None and subresource:
            raise not_found(kind.plural, kind.group, name)
        strategy = self.strategy(kind)
        body = typed(identified(kind, namespace, name, body), strategy.schema)
        refuse_unknown(kind, strategy.decode(body)[1], options.field_validation)
        reserved = {"status"} if kind.has_status and subresource != "status" else set()
        if subresource == "status":
            reserved = set(body) - {"status", "metadata", "apiVersion", "kind"}
        applied = {key: value for key, value in body.items() if key not in reserved}
        manager = Manager(options.manager, "Apply", kind.api_version, subresource)
        owners = read_owners(live) if live is not None else {}
        if live is not None:
            metadata = body["metadata"]
            check_preconditions(kind, live, metadata.get("uid"), metadata.get("resourceVersion"))
        merged, owners = apply(live, applied, strategy.schema, owners, manager, force=options.force)
        if live is None:
            self._check_namespace(kind, namespace)
            created = self._new(kind, strategy.decode(merged)[0])
            return self._written(kind, None, with_owners(created, owners, self.now()), options, [])
        merged = strategy.decode(merged)[0]
        new = carried_over(kind, live, merged, subresource, has_generation=strategy.has_generation)
        return self._written(kind, live, with_owners(new, owners, self.now()), options, [])

    def _update(
        self, kind: Kind, old: Object, obj: Object, options: WriteOptions, subresource: str, warnings: list[str]
    ) -> Written:
        metadata = obj["metadata"]
        check_preconditions(kind, old, metadata.get("uid"), metadata.get("resourceVersion"))
        new = carried_over(kind, old, obj, subresource, has_generation=self.strategy(kind).has_generation)
        manager = Manager(options.manager, "Update", kind.api_version, subresource)
        schema = self.strategy(kind).schema
        owners = owners_after_update(old, new, schema, read_owners(old), manager)
        if owners != read_owners(old):
            new = with_owners(new, owners, self.now())
        return self._written(kind, old, new, options, warnings)

    def _new(self, kind: Kind, obj: Object) -> Object:
        metadata = {**obj["metadata"], "uid": self._new_uid(), "creationTimestamp": self.now()}
        for name in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink"):
            metadata.pop(name, None)
        if self.strategy(kind).has_generation:
            metadata["generation"] = 1
        obj = {**obj, "metadata": metadata}
        if kind.has_status and kind.name not in {"Pod", "Namespace", "Node"}:
            obj = without(obj, "status")
        if kind.name == "Service" and not obj["spec"].get("clusterIP") and obj["spec"]["type"] != "ExternalName":
            self._next_cluster_ip += 1
            address = f"10.96.{self._next_cluster_ip // 256}.{self._next_cluster_ip % 256}"
            obj["spec"] = {**obj["spec"], "clusterIP": address, "clusterIPs": [address]}
        return obj

    def _written(
        self, kind: Kind, old: Object | None, new: Object, options: WriteOptions, warnings: list[str]
    ) -> Written:
        return Written(self._commit(kind, old, new, options), old, new, warnings)

    def _commit(self, kind: Kind, old: Object | None, new: Object, options: WriteOptions) -> Object:
        """Validate and store; an update that changes nothing keeps its resourceVersion."""
        if new == old:
            return self.present(kind, new)
        if errors := self.strategy(kind).validate(new, old):
            raise invalid(kind.name, kind.group, new["metadata"]["name"], errors)
        if old is None:
            self._check_quota(kind, new)
        if kind.name == "CustomResourceDefinition":
            new = established(new, self.now())
        if options.dry_run:
            return self.present(kind, new)
        if old is not None and is_removable(kind, new) and "deletionTimestamp" in new["metadata"]:
            self.store.put(kind.collection, new)
            return self.present(kind, self._remove(kind, new["metadata"].get("namespace", ""), new["metadata"]["name"]))
        stored = self.store.put(kind.collection, new)
        if kind.name == "CustomResourceDefinition":
            self._serve(stored)
        return self.present(kind, stored)

    def _decode(
        self, kind: Kind, namespace: str, name: str, obj: Object, options: WriteOptions
    ) -> tuple[Object, list[str]]:
        obj = identified(kind, namespace, name, obj)
        try:
            obj = with_quantities(obj, self.strategy(kind).schema)
        except ValueError as error:
            what = f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}'
            raise bad_request(f"{what}: {error}") from error
        decoded, unknown = self.strategy(kind).decode(obj)
        warnings = refuse_unknown(kind, unknown, options.field_validation)
        if kind.group == "events.k8s.io":
            decoded = event_to_core(decoded)
        return decoded, warnings

    # -- removing ---------------------------------------------------------------------------------------------------

    def finalize(self, kind: Kind, name: str, obj: Object, options: WriteOptions) -> Written:
        """`namespaces/NAME/finalize`: the namespace controller removes the finalizer of an empty namespace."""
        return self.update(kind, "", name, obj, replace(options, field_validation="Ignore"))

    def _remove(self, kind: Kind, namespace: str, name: str) -> Object:
        removed = self.store.remove(kind.collection, namespace, name)
        if kind.custom:
            self._finish_definition(kind)
        if kind.name == "CustomResourceDefinition":
            spec = removed["spec"]
            self.kinds.remove(spec["group"], spec["names"]["plural"])
        return self.present(kind, removed)

    def _serve(self, definition: Object) -> None:
        spec = definition["spec"]
        self.kinds.remove(spec["group"], spec["names"]["plural"])
        for kind in kinds_of(definition):
            self.kinds.add(kind)
            self._strategies.pop((kind.group, kind.version, kind.plural), None)
            self.store.convert(kind.collection, self.strategy(kind).read)

    def _delete_definition(self, kind: Kind, marked: Object) -> tuple[Object, bool]:
        """Delete the objects of a definition; it is removed with the last of them."""
        self.store.put(kind.collection, marked)
        name = marked["metadata"]["name"]
        for served in kinds_of(marked)[:1]:
            for obj in tuple(self.store.list(served.collection)):
                metadata = obj["metadata"]
                self.delete(served, metadata.get("namespace", ""), metadata["name"], DeleteOptions())
            self._finish_definition(served)
        left = self.store.get(kind.collection, "", name)
        return (left, False) if left is not None else (marked, True)

    def _finish_definition(self, served: Kind) -> None:
        definitions = self.kinds.find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
        definition = self.store.get(definitions.collection, "", f"{served.plural}.{served.group}")
        if definition is None or "deletionTimestamp" not in definition["metadata"]:
            return
        if next(self.store.list(served.collection), None) is None:
            finalizers = [name for name in definition["metadata"]["finalizers"] if name != CLEANUP_FINALIZER]
            definition = {**definition, "metadata": {**definition["metadata"], "finalizers": finalizers}}
            self.store.put(definitions.collection, definition)
            if not finalizers:
                self._remove(definitions, "", definition["metadata"]["name"])

    def _stored(self, kind: Kind, namespace: str, name: str) -> Object:
        found = self.store.get(kind.collection, namespace if kind.namespaced else "", name)
        if found is None:
            raise not_found(kind.plural, kind.group, name)
        return found

    def _check_namespace(self, kind: Kind, namespace: str) -> None:
        if not kind.namespaced:
            return
        found = self.store.get(("", "namespaces"), "", namespace)
        if found is None:
            raise not_found("namespaces", "", namespace)
        if "deletionTimestamp" in found["metadata"]:
            message = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise ApiError(403, "Forbidden", message)

    def _check_quota(self, kind: Kind, obj: Object) -> None:
        """Raise `ApiError` 403 for a pod that would exceed a ResourceQuota."""
        if kind.collection != ("", "pods"):
            return
        namespace = obj["metadata"]["namespace"]
        quotas = self.store.list(("", "resourcequotas"), namespace)
        why = exceeded_quota(obj, self.store.list(kind.collection, namespace), quotas)
        if why is not None:
            name = obj["metadata"]["name"]
            raise ApiError(403, "Forbidden", f'pods "{name}" is forbidden: {why}', {"name": name, "kind": "pods"})

    def now(self) -> str:
        """The server's time in the format of object timestamps."""
        return timestamp(self._clock())
