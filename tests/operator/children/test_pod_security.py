"""Every pod of ours against the Pod Security Standards, level `restricted`, control by control.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from llmservice_operator.children.deployment import expected_deployment
from llmservice_operator.models.source import ModelLocation
from llmservice_operator.sizing.sizing import Sized
from llmservice_planner.gpu import find_gpu

VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
LOCATIONS = {
    "pvc": ModelLocation("pvc", "/models/llama", claim="weights"),
    "hf": ModelLocation("hf", "/models/name", fetch_uri="hf://org/name@v1"),
}


def violations(spec: dict[str, Any]) -> Iterator[str]:
    """What the `restricted` level objects to in a pod's spec."""
    for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        if spec.get(name):
            yield name
    for volume in spec.get("volumes", []):
        if kinds := volume.keys() - {"name"} - VOLUMES:
            yield f"volume {volume['name']} is a {kinds}"
    pod = spec.get("securityContext", {})
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own, name = container.get("securityContext", {}), container["name"]
        context = {**pod, **own}
        if context.get("privileged") or context.get("procMount", "Default") != "Default":
            yield f"{name}: privileged"
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation"
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"):
            yield f"{name}: capabilities"
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
            yield f"{name}: runs as root"
        if context.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
            yield f"{name}: seccomp"
        if any("hostPort" in port for port in container.get("ports", [])):
            yield f"{name}: hostPort"


@pytest.mark.parametrize("location", LOCATIONS.values(), ids=LOCATIONS)
@pytest.mark.parametrize("card", [None, "l4"])
def test_pods_meet_the_restricted_standard(
    location: ModelLocation, card: str | None, service_of: Any, sized: Sized
) -> None:
    service = service_of(resources={"gpu": {"product": "l4"}} if card else {"gpu": {"count": 0}})
    found = replace(
        sized, model=replace(sized.model, location=location), device=find_gpu(card) if card else sized.device
    )

    spec = expected_deployment(service, found, 1, "img:1")["spec"]["template"]["spec"]

    assert list(violations(spec)) == []
    assert spec["automountServiceAccountToken"] is False
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize(
    ("change", "objection"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "volume v"),
        ({"securityContext": {}}, "server: seccomp"),
    ],
)
def test_the_check_above_would_notice(change: dict[str, Any], objection: str, service_of: Any, sized: Sized) -> None:
    spec = expected_deployment(service_of(), sized, 1, "img:1")["spec"]["template"]["spec"] | change

    assert any(objection in one for one in violations(spec))
