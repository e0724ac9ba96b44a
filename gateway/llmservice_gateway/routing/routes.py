"""Routing as plain data: LLMServices and pods in, a table from a model's name to its ready pods out.

Each object is read once, when it changes, for the little that is routed by; the table is built of that at each change
of it. Pure: no I/O and no clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any

from llmservice_gateway.openai_error import GatewayError
from llmservice_planner.addresses import endpoint

SERVED_NAME_ANNOTATION = "serving.llmservice.io/served-name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
PORT_NAME = "http"
LEAST_LOAD = "leastLoad"
DEFAULT_PORT = 8000

Manifest = Mapping[str, Any]
Adapters = Mapping[str, str | None]
"""What a pod reports of its LoRA adapters: by name, None where requests may name it, else why it cannot be loaded."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One pod that requests may be sent to. `uid` distinguishes a new pod with the address of an earlier one."""

    uid: str
    name: str
    url: str
    slots: int | None = None
    """Requests that it runs at once, at most (`status.sizing.maxNumSeqs` of its service); more wait there. None:
    unknown. A pod reports with each response how many it runs of requests like those before."""
    service: str = ""
    """Its LLMService, as `namespace/name`."""


WAITING_CURES = frozenset(
    {"ScaledToZero", "Starting", "FetchingModel", "PartlyReady", "RollingOut", "ServingEarlierSpec", "Unschedulable"}
    | {"Updating", "Serving", "EngineFailed", "Killed"}
)
"""Reasons of the operator's condition Ready while a pod can be expected to become ready without anyone's doing."""


@dataclass(frozen=True, slots=True)
class Service:
    """An LLMService as the cause of pods that become ready, or do not."""

    name: str
    reason: str = "Starting"
    """Of its condition Ready; that of a new service until the operator has written one."""
    message: str = ""
    by_prefix: bool = True
    """`spec.routing.strategy`."""

    @property
    def is_awaited(self) -> bool:
        """Whether a request without a ready pod is held for this service."""
        return self.reason in WAITING_CURES


@dataclass(frozen=True, slots=True)
class Route:
    """The pods of one served name in one namespace; without backends the model is known but not ready."""

    namespace: str
    served_name: str
    created: int = 0
    """Seconds since the epoch, for OpenAI's `created`."""
    backends: tuple[Backend, ...] = ()
    parent: str | None = None
    """Of a LoRA adapter, the served name of its model."""
    services: tuple[Service, ...] = ()
    """Those whose pods serve it, the ones that requests are held for first."""
    by_prefix: bool = True
    """Whether requests go to the pod that has the beginning of their prompt; else to the least loaded."""


@dataclass(frozen=True, slots=True)
class RouteTable:
    """Every served name of the cluster. Replaced as a whole on each change, so that readers need no lock."""

    routes: Mapping[str, tuple[Route, ...]] = field(default_factory=dict)
    """By served name; the first route of several is the one that the bare name belongs to."""
    namespaces: frozenset[str] = frozenset()
    """Those that have a service."""
    adapted: tuple[Backend, ...] = ()
    """The pods of services that list adapters."""

    def find(self, model: str) -> Route:
        """The route of `namespace/served-name`, or of the oldest service that claims the bare `served-name`.

        A served name may contain a slash itself. Where the part before it is a namespace with services, it means that
        namespace alone, so that no other namespace can take over the name `team-a/llama`.

        Raises:
            GatewayError: 404; its text says where the names are listed.
        """
        namespace, _, served_name = model.partition("/")
        if namespace in self.namespaces and served_name:
            found = [route for route in self.routes.get(served_name, ()) if route.namespace == namespace]
        else:
            found = list(self.routes.get(model, ())[:1])
        if found:
            return found[0]
        message = f"The model `{model}` does not exist: no LLMService serves it. GET /v1/models lists what is served."
        raise GatewayError(404, message, "model_not_found", "model")

    def models(self) -> list[tuple[str, Route]]:
        """Each model's name as a request should give it (qualified where it must be), in alphabetical order."""
        named = [
            (served_name if self._is_found(served_name, route) else f"{route.namespace}/{served_name}", route)
            for served_name, routes in self.routes.items()
            for route in routes
        ]
        return sorted(named, key=lambda entry: entry[0])

    def _is_found(self, served_name: str, route: Route) -> bool:
        try:
            return self.find(served_name) is route
        except GatewayError:
            return False


@dataclass(frozen=True, slots=True)
class RoutedService:
    """All that the table needs of an LLMService."""

    namespace: str
    created: int
    served_name: str
    slots: int | None
    state: Service
    adapters: tuple[str, ...]

    @classmethod
    def parse(cls, manifest: Manifest) -> RoutedService:
        metadata, spec = manifest["metadata"], manifest.get("spec", {})
        return cls(
            metadata.get("namespace", ""),
            _epoch(metadata.get("creationTimestamp")),
            served_name_of(manifest),
            _slots(manifest),
            _state(manifest),
            tuple(str(adapter["name"]) for adapter in spec.get("adapters") or ()),
        )


@dataclass(frozen=True, slots=True)
class RoutedPod:
    """All that the table needs of a pod."""

    namespace: str
    service: str
    served_name: str
    """That it was started with; empty: its service's."""
    uid: str
    name: str
    url: str

    @classmethod
    def parse(cls, manifest: Manifest) -> RoutedPod | None:
        """None for a pod that gets no requests."""
        if not is_routable(manifest):
            return None
        metadata = manifest["metadata"]
        return cls(
            metadata.get("namespace", ""),
            metadata.get("labels", {}).get(INSTANCE_LABEL, ""),
            metadata.get("annotations", {}).get(SERVED_NAME_ANNOTATION) or "",
            metadata["uid"],
            metadata["name"],
            _url(manifest),
        )


@dataclass(frozen=True, slots=True)
class _Owner:
    """One LLMService, with its pods."""

    service: RoutedService
    pods: list[Backend] = field(default_factory=list)


@dataclass(slots=True)
class _Name:
    """What is known of a served name of a namespace."""

    created: float = math.inf
    """Names that only pods have come last."""
    parent: str | None = None
    backends: list[Backend] = field(default_factory=list)
    services: list[Service] = field(default_factory=list)

    def route(self, namespace: str, served_name: str) -> Route:
        return Route(
            namespace,
            served_name,
            created=0 if self.created == math.inf else int(self.created),
            backends=tuple(sorted(self.backends, key=lambda backend: backend.name)),
            parent=self.parent,
            services=tuple(sorted(self.services, key=lambda state: not state.is_awaited)),
            by_prefix=all(state.by_prefix for state in self.services),
        )


def build_table(
    services: Iterable[RoutedService],
    pods: Iterable[RoutedPod],
    reported: Mapping[str, Adapters] = MappingProxyType({}),
) -> RouteTable:
    """The table for the cluster as seen now.

    A pod serves the name that it was started with (its annotation), not the present one of its service: while a renamed
    service rolls out, the old name works while there is a pod of that name. Services of one namespace with the same
    served name share its requests.

    A LoRA adapter that services list has a route of its own, to those of their pods that have loaded it (`reported`: by
    the pod's uid). A model's name goes before an adapter's.
    """
    owners: dict[tuple[str, str], _Owner] = {}
    names: dict[tuple[str, str], _Name] = defaultdict(_Name)
    listed: dict[tuple[str, str], list[_Owner]] = defaultdict(list)
    for service in services:
        owner = owners[service.namespace, service.state.name] = _Owner(service)
        model = names[service.namespace, service.served_name]
        model.created = min(model.created, service.created)
        model.services.append(service.state)
        for adapter in service.adapters:
            listed[service.namespace, adapter].append(owner)
    for pod in pods:
        if (found := owners.get((pod.namespace, pod.service))) is None:
            continue
        backend = Backend(pod.uid, pod.name, pod.url, found.service.slots, f"{pod.namespace}/{pod.service}")
        names[pod.namespace, pod.served_name or found.service.served_name].backends.append(backend)
        found.pods.append(backend)
    names |= {key: _adapter(key[1], listers, reported) for key, listers in listed.items() if key not in names}
    routes: dict[str, list[Route]] = defaultdict(list)
    for key in sorted(names, key=lambda key: (names[key].created, key)):
        routes[key[1]].append(names[key].route(*key))
    namespaces = frozenset(namespace for namespace, _ in owners)
    polled = {backend.uid: backend for listers in listed.values() for owner in listers for backend in owner.pods}
    return RouteTable({name: tuple(found) for name, found in routes.items()}, namespaces, tuple(polled.values()))


def _adapter(name: str, listers: Sequence[_Owner], reported: Mapping[str, Adapters]) -> _Name:
    """Of the services that list it."""
    created, parent = min((owner.service.created, owner.service.served_name) for owner in listers)
    found = _Name(created, parent)
    for owner in listers:
        reports = [(pod, reported[pod.uid]) for pod in owner.pods if pod.uid in reported]
        found.backends += [pod for pod, report in reports if report.get(name, "") is None]
        found.services.append(_adapter_state(owner.service.state, [report.get(name) for _, report in reports]))
    return found


def _adapter_state(state: Service, errors: Sequence[str | None]) -> Service:
    """Of a service as the cause of pods with an adapter: none can be expected where all have failed to load it."""
    if errors and errors[0] is not None and None not in errors:
        return replace(state, reason="AdapterLoadFailed", message=errors[0])
    return state


def served_name_of(service: Manifest) -> str:
    """The name that clients put in `model`: `spec.model.servedName`, by default the service's own name."""
    return str(service.get("spec", {}).get("model", {}).get("servedName") or service["metadata"]["name"])


def _state(service: Manifest) -> Service:
    name, spec = service["metadata"]["name"], service.get("spec", {})
    reason, message = _readiness(service, spec)
    return Service(name, reason, message, (spec.get("routing") or {}).get("strategy") != LEAST_LOAD)


def _readiness(service: Manifest, spec: Manifest) -> tuple[str, str]:
    """The reason and the message of the condition Ready, or what is known before the operator has reported it."""
    if service["metadata"].get("deletionTimestamp"):
        return "Deleted", "the LLMService is being deleted"
    if spec.get("replicas") == 0 and not spec.get("autoscaling"):
        return "NoReplicas", "no replica is asked for: raise spec.replicas to serve"
    conditions = (service.get("status") or {}).get("conditions") or ()
    ready = next((one for one in conditions if one.get("type") == "Ready"), None)
    if ready is None or ready.get("reason") == "NoReplicas":  # the present spec asks for replicas
        return "Starting", ""
    return str(ready.get("reason", "")), str(ready.get("message", ""))


def _slots(service: Manifest) -> int | None:
    sizing = (service.get("status") or {}).get("sizing") or {}
    return int(sizing["maxNumSeqs"]) if sizing.get("maxNumSeqs") else None


def is_routable(pod: Manifest) -> bool:
    """Ready, with an address, and not terminating.

    A pod gets no new requests from its deletionTimestamp on, before its readiness changes.
    """
    if pod["metadata"].get("deletionTimestamp"):
        return False
    status = pod.get("status", {})
    conditions = status.get("conditions") or ()
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return ready and bool(status.get("podIP"))


def _url(pod: Manifest) -> str:
    return f"http://{endpoint(pod['status']['podIP'], _port(pod))}"


def _port(pod: Manifest) -> int:
    for container in pod.get("spec", {}).get("containers", ()):
        for port in container.get("ports") or ():
            if port.get("name") == PORT_NAME:
                return int(port["containerPort"])
    return DEFAULT_PORT


def _epoch(timestamp: str | None) -> int:
    return int(datetime.fromisoformat(timestamp).timestamp()) if timestamp else 0
