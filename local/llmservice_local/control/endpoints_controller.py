"""Endpoints and EndpointSlices: the addresses of the pods that a Service selects, ready and not."""

from __future__ import annotations

from collections.abc import Sequence

from llmservice_local.client import ENDPOINT_SLICES, ENDPOINTS, PODS, SERVICES, Resource
from llmservice_local.control.controller import Controller
from llmservice_local.objects import Object, controller_reference, is_ready


class EndpointsController(Controller):
    name = "endpoints-controller"
    watches = (SERVICES, PODS, ENDPOINTS, ENDPOINT_SLICES)

    async def reconcile(self) -> float | None:
        pods = list(self.informer(PODS))
        for service in self.informer(SERVICES):
            selector = service["spec"].get("selector")
            if not selector or "deletionTimestamp" in service["metadata"]:
                continue
            namespace = service["metadata"]["namespace"]
            backing = [
                pod
                for pod in pods
                if pod["metadata"]["namespace"] == namespace
                and selector.items() <= (pod["metadata"].get("labels") or {}).items()
                and (pod.get("status") or {}).get("podIP")
                and (pod["status"].get("phase") == "Running")
            ]
            backing.sort(key=lambda pod: str(pod["metadata"]["name"]))
            await self._write(ENDPOINTS, service, {"subsets": subsets(service, backing)})
            await self._write(ENDPOINT_SLICES, service, endpoint_slice(service, backing))
        return None

    async def _write(self, resource: Resource, service: Object, content: Object) -> None:
        metadata = service["metadata"]
        known = self.informer(resource).get(metadata["namespace"], metadata["name"])
        if known is None:
            obj = {
                "apiVersion": resource.api_version,
                "kind": "Endpoints" if resource is ENDPOINTS else "EndpointSlice",
                "metadata": {
                    "name": metadata["name"],
                    "labels": {**(metadata.get("labels") or {}), "kubernetes.io/service-name": metadata["name"]},
                    "ownerReferences": [controller_reference({**service, "apiVersion": "v1", "kind": "Service"})],
                },
                **content,
            }
            self.informer(resource).observe(await self.client.create(resource, metadata["namespace"], obj))
        elif any(known.get(field) != value for field, value in content.items()):
            self.informer(resource).observe(await self.client.merge(resource, known, content))


def subsets(service: Object, pods: Sequence[Object]) -> list[Object]:
    """The subsets of an Endpoints object, without pods that are being deleted."""
    live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    if not live:
        return []
    subset: Object = {"ports": _ports(service, live[0])}
    for field, chosen in (
        ("addresses", [pod for pod in live if is_ready(pod)]),
        ("notReadyAddresses", [pod for pod in live if not is_ready(pod)]),
    ):
        if chosen:
            subset[field] = [
                {"ip": pod["status"]["podIP"], "nodeName": pod["spec"].get("nodeName"), "targetRef": _target(pod)}
                for pod in chosen
            ]
    return [subset]


def endpoint_slice(service: Object, pods: Sequence[Object]) -> Object:
    """The content of the Service's only EndpointSlice, with the conditions ready, serving and terminating."""
    endpoints = []
    for pod in pods:
        ready, terminating = is_ready(pod), "deletionTimestamp" in pod["metadata"]
        endpoints.append(
            {
                "addresses": [pod["status"]["podIP"]],
                "conditions": {"ready": ready and not terminating, "serving": ready, "terminating": terminating},
                "nodeName": pod["spec"].get("nodeName"),
                "targetRef": _target(pod),
            }
        )
    ports = _ports(service, pods[0]) if pods else []
    return {"addressType": "IPv4", "endpoints": endpoints, "ports": ports}


def _target(pod: Object) -> Object:
    metadata = pod["metadata"]
    return {"kind": "Pod", "name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]}


def _ports(service: Object, pod: Object) -> list[Object]:
    found = []
    for port in service["spec"].get("ports") or []:
        target = port.get("targetPort", port["port"])
        number = target if isinstance(target, int) else _named_port(pod, target)
        if number is not None:
            name = {"name": port["name"]} if port.get("name") else {}
            found.append({**name, "port": number, "protocol": port.get("protocol", "TCP")})
    return found


def _named_port(pod: Object, name: str) -> int | None:
    ports = (port for container in pod["spec"]["containers"] for port in container.get("ports") or [])
    return next((port["containerPort"] for port in ports if port.get("name") == name), None)
