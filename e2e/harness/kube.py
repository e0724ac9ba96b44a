"""The cluster's objects through the official Python client, as plain dicts."""

from __future__ import annotations

from typing import Any

from kubernetes import client, config

from harness.cluster import Cluster
from harness.release import NAMESPACE
from harness.wait import wait_for

GROUP, VERSION, PLURAL = "serving.llmservice.io", "v1alpha1", "llmservices"
Object = dict[str, Any]


class Kube:
    """What a test does to one namespace."""

    def __init__(self, cluster: Cluster, namespace: str = "default") -> None:
        self.namespace = namespace
        self.api = config.new_client_from_config(str(cluster.kubeconfig))
        self.custom = client.CustomObjectsApi(self.api)
        self.core = client.CoreV1Api(self.api)
        self.apps = client.AppsV1Api(self.api)
        self.coordination = client.CoordinationV1Api(self.api)

    def create(self, service: Object) -> Object:
        return self.custom.create_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, service)  # type: ignore[no-any-return]

    def get(self, name: str) -> Object:
        return self.custom.get_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name)  # type: ignore[no-any-return]

    def patch(self, name: str, patch: Object) -> Object:
        return self.custom.patch_namespaced_custom_object(  # type: ignore[no-any-return]
            GROUP, VERSION, self.namespace, PLURAL, name, patch, _content_type="application/merge-patch+json"
        )

    def delete(self, name: str) -> None:
        self.custom.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name)

    def services(self) -> list[Object]:
        return self.custom.list_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL)["items"]  # type: ignore[no-any-return]

    def condition(self, name: str, kind: str) -> Object:
        conditions = self.get(name).get("status", {}).get("conditions", [])
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def wait_condition(self, name: str, kind: str, status: str, timeout_s: float = 60) -> Object:
        def found() -> Object | None:
            condition = self.condition(name, kind)
            return condition if condition.get("status") == status else None

        return wait_for(found, timeout_s, lambda: self.get(name).get("status"))

    def leader(self) -> str:
        """The operator that holds the Lease, as HOST_PID_ID; empty while it is free."""
        return self.coordination.read_namespaced_lease("llmservice-operator", NAMESPACE).spec.holder_identity or ""

    def pods(self, name: str) -> list[Object]:
        pods = self.core.list_namespaced_pod(self.namespace, label_selector=f"app.kubernetes.io/instance={name}")
        return [self.api.sanitize_for_serialization(pod) for pod in pods.items]

    def deployment(self, name: str) -> Object | None:
        try:
            return self.api.sanitize_for_serialization(self.apps.read_namespaced_deployment(name, self.namespace))  # type: ignore[no-any-return]
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise


TINY_SHAPE: Object = {
    "layers": 4, "heads": 8, "kvHeads": 4, "headDim": 32, "hiddenSize": 256, "intermediateSize": 688,
    "vocabSize": 1024, "maxPositionEmbeddings": 2048, "dtype": "float32",
}  # fmt: skip
"""What `llmservice make-tiny-model` writes; the operator reads a file:// model itself."""


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def tiny_service(name: str, uri: str, **spec: Any) -> Object:
    """A service that a laptop can overload; `spec` replaces whole fields. The operator sizes it."""
    shape = {"shape": TINY_SHAPE} if uri.startswith("pvc://") else {}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "LLMService",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": uri, "servedName": name, "dtype": "float32", **shape},
            "resources": {"gpu": {"count": 0}, "requests": {"cpu": "250m", "memory": "1Gi"}},
            "engine": {"maxNumSeqs": 4, "maxNumBatchedTokens": 512},
            "drainTimeout": "30s",
            **spec,
        },
    }
