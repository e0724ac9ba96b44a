"""What `up --release` takes from the manifests that `helm template` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.release import write_release
from llmservice_local.errors import ApiError
from llmservice_local.manifests import read_release
from llmservice_planner.command import main

EXTRA = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "extra"},
    "spec": {"template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}},
}


def test_parts_are_called_as_their_deployments_call_them(tmp_path: Path) -> None:
    values = {"namespaces": ["team-a"], "operator": {"replicas": 3, "tickSeconds": 2}}
    release = read_release(write_release(tmp_path / "release.yaml", values))

    gateway, operator = release.parts["gateway"], release.parts["operator"]
    assert (gateway.namespace, gateway.account, gateway.replicas) == ("llmservice-system", "llmservice-gateway", 1)
    assert {"--port=8080", "--metrics-port=8001", "--drain-timeout=120", "--namespace=team-a"} <= set(gateway.arguments)
    assert (operator.account, operator.replicas) == ("llmservice-operator", 3)
    assert {"--tick=2", "--namespace=team-a", "--leader-elect"} <= set(operator.arguments)


def test_grants_are_accounts_roles_policies_and_bindings_and_nothing_else(tmp_path: Path) -> None:
    everywhere = read_release(write_release(tmp_path / "everywhere.yaml", {}))
    confined = read_release(write_release(tmp_path / "confined.yaml", {"namespaces": ["team-a"]}))

    confined_kinds = {"ServiceAccount", "Role", "RoleBinding"}
    cluster_wide = {
        "ClusterRole",
        "ClusterRoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    }
    assert {one["kind"] for one in everywhere.grants} == confined_kinds | cluster_wide
    assert {one["kind"] for one in confined.grants} == confined_kinds


def test_extra_deployments_are_ignored_and_a_gateway_is_optional(tmp_path: Path) -> None:
    values = {"extraObjects": [EXTRA], "gateway": {"enabled": False}}

    assert set(read_release(write_release(tmp_path / "release.yaml", values)).parts) == {"operator"}


def test_a_file_without_our_operator_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("{apiVersion: v1, kind: ConfigMap, metadata: {name: m}}", encoding="utf-8")
    with pytest.raises(ApiError, match="no Deployment of our operator"):
        read_release(path)

    assert main(["up", "--release", str(path)]) == 2
    assert "output of `helm template`" in capsys.readouterr().err
    assert main(["up", "--release", str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err
