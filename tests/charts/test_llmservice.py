"""The chart, linted, rendered and schema-checked by Helm itself (as a library: no binary is needed)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "llmservice"
CRD = "llmservices.serving.llmservice.io.yaml"

VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "namespaced": {"namespaces": ["team-a", "team-b"]},
    "no gateway": {"gateway": {"enabled": False}, "serviceMonitor": {"enabled": True}},
    "everything": {
        "image": {"registry": "registry.example.com/ml/", "tag": "1.2.3", "pullSecrets": ["pull"]},
        "namespaces": ["team-a"],
        "crds": {"keep": False},
        "operator": {
            "prometheusUrl": "http://prometheus.monitoring.svc:9090",
            "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "podAnnotations": {"a": "b"},
            "serviceAccount": {"annotations": {"c": "d"}},
        },
        "gateway": {"replicas": 3, "service": {"type": "LoadBalancer", "annotations": {"e": "f"}}},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
}


@pytest.fixture(scope="module")
def chart() -> Iterator[helm.Chart]:
    with helm.Chart.load(CHART) as loaded:
        yield loaded


def render(chart: helm.Chart, values: dict[str, Any]) -> list[dict[str, Any]]:
    files = chart.render(values, name="release", namespace="system")
    return [
        manifest
        for path, text in files.items()
        if path.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]


@pytest.fixture(params=VALUES)
def manifests(request: pytest.FixtureRequest, chart: helm.Chart) -> list[dict[str, Any]]:
    return render(chart, VALUES[request.param])


def of_kind(manifests: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def named(manifests: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"] == name]
    return found


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_lint_finds_nothing(values: dict[str, Any]) -> None:
    report = helm.lint(CHART, values, strict=True)
    warnings = [message for message in report["messages"] if message["severity"] > 1]
    assert (report["errors"], warnings) == ([], [])


def test_every_object_is_named_once_and_labelled(manifests: list[dict[str, Any]]) -> None:
    identities = [(m["kind"], m["metadata"].get("namespace"), m["metadata"]["name"]) for m in manifests]
    assert len(identities) == len(set(identities))
    for manifest in manifests:
        if manifest["kind"] == "CustomResourceDefinition":
            continue
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "release"
        assert labels["app.kubernetes.io/part-of"] == "llmservice"
        assert all(isinstance(value, str) and len(value) <= 63 for value in labels.values())


def test_pods_meet_the_restricted_pod_security_standard(manifests: list[dict[str, Any]]) -> None:
    deployments = of_kind(manifests, "Deployment")
    assert deployments
    for deployment in deployments:
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all(volume.keys() - {"name"} <= {"emptyDir", "configMap", "secret"} for volume in pod["volumes"])
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_pods_have_probes_resources_and_a_pinned_image(manifests: list[dict[str, Any]]) -> None:
    for deployment in of_kind(manifests, "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        _, _, tag = container["image"].rpartition(":")
        assert tag not in {"", "latest"}


def test_selectors_match_their_pods_and_no_pod_of_an_llmservice(manifests: list[dict[str, Any]]) -> None:
    pods = {
        deployment["metadata"]["name"]: deployment["spec"]["template"]["metadata"]["labels"]
        for deployment in of_kind(manifests, "Deployment")
    }
    for deployment in of_kind(manifests, "Deployment"):
        assert deployment["spec"]["selector"]["matchLabels"].items() <= pods[deployment["metadata"]["name"]].items()
    for service in of_kind(manifests, "Service"):
        selected = [name for name, labels in pods.items() if service["spec"]["selector"].items() <= labels.items()]
        assert selected == [service["metadata"]["name"]]
    for labels in pods.values():
        assert labels["app.kubernetes.io/name"] != "llmservice", "the name that every LLMService's pods carry"


def test_roles_have_no_wildcard_and_no_secret(manifests: list[dict[str, Any]]) -> None:
    roles = of_kind(manifests, "Role", "ClusterRole")
    assert roles
    for rule in (rule for role in roles for rule in role["rules"]):
        assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]
        assert not {"secrets", "pods/exec", "roles", "rolebindings", "clusterroles"} & set(rule["resources"])
        assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"])


def test_gateway_may_only_read(manifests: list[dict[str, Any]]) -> None:
    for role in of_kind(manifests, "Role", "ClusterRole"):
        if role["metadata"]["name"].endswith("-gateway"):
            assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}


def test_bindings_name_an_existing_role_and_account(manifests: list[dict[str, Any]]) -> None:
    accounts = {(m["metadata"]["namespace"], m["metadata"]["name"]) for m in of_kind(manifests, "ServiceAccount")}
    for binding in of_kind(manifests, "RoleBinding", "ClusterRoleBinding"):
        role = named_in(manifests, binding)
        assert role["kind"] == binding["roleRef"]["kind"]
        (subject,) = binding["subjects"]
        assert (subject["namespace"], subject["name"]) in accounts
    for deployment in of_kind(manifests, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        assert (deployment["metadata"]["namespace"], pod["serviceAccountName"]) in accounts


def named_in(manifests: list[dict[str, Any]], binding: dict[str, Any]) -> dict[str, Any]:
    (role,) = [
        manifest
        for manifest in of_kind(manifests, "Role", "ClusterRole")
        if manifest["metadata"]["name"] == binding["roleRef"]["name"]
        and manifest["metadata"].get("namespace") == binding["metadata"].get("namespace")
    ]
    return role


def test_commands_of_the_pods_take_their_arguments(manifests: list[dict[str, Any]]) -> None:
    commands = {entry.name: entry for entry in entry_points(group="llmservice.commands")}
    for deployment in of_kind(manifests, "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        name, *flags = container["args"]
        parser = argparse.ArgumentParser(exit_on_error=False)
        commands[name].load().add_arguments(parser)
        parser.parse_args(flags)


def test_namespaced_mode_has_nothing_cluster_wide_but_the_crd(chart: helm.Chart) -> None:
    manifests = render(chart, VALUES["namespaced"])
    assert not of_kind(manifests, "ClusterRole", "ClusterRoleBinding")
    for name in ("release-llmservice-operator", "release-llmservice-gateway"):
        roles = [role for role in of_kind(manifests, "Role") if role["metadata"]["name"] == name]
        assert {"team-a", "team-b"} <= {role["metadata"]["namespace"] for role in roles}
        args = named(manifests, "Deployment", name)["spec"]["template"]["spec"]["containers"][0]["args"]
        assert [flag for flag in args if flag.startswith("--namespace")] == ["--namespace=team-a", "--namespace=team-b"]


def test_images_take_registry_and_tag_and_the_operator_is_told_the_servers(chart: helm.Chart) -> None:
    operator = named(render(chart, VALUES["everything"]), "Deployment", "release-llmservice-operator")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.com/ml/llmservice-operator:1.2.3"
    assert "--server-image=registry.example.com/ml/llmservice-server:1.2.3" in container["args"]
    assert "--prometheus-url=http://prometheus.monitoring.svc:9090" in container["args"]
    assert operator["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "pull"}]


def test_two_operators_never_run_at_once(chart: helm.Chart) -> None:
    operator = named(render(chart, {}), "Deployment", "release-llmservice-operator")
    assert operator["spec"]["replicas"] == 1
    assert operator["spec"]["strategy"] == {"type": "Recreate"}


def test_gateways_grace_period_is_longer_than_its_drain(chart: helm.Chart) -> None:
    gateway = named(
        render(chart, {"gateway": {"drainTimeoutSeconds": 300}}), "Deployment", "release-llmservice-gateway"
    )
    pod = gateway["spec"]["template"]["spec"]
    assert "--drain-timeout=300" in pod["containers"][0]["args"]
    assert pod["terminationGracePeriodSeconds"] > 300 + 5


def test_budget_is_left_out_where_it_would_block_a_drain(chart: helm.Chart) -> None:
    assert of_kind(render(chart, {}), "PodDisruptionBudget")
    assert not of_kind(render(chart, {"gateway": {"replicas": 1}}), "PodDisruptionBudget")


def test_gateway_can_be_left_out(chart: helm.Chart) -> None:
    manifests = render(chart, VALUES["no gateway"])
    assert not [manifest for manifest in manifests if "gateway" in manifest["metadata"]["name"]]


@pytest.mark.parametrize("keep", [True, False])
def test_crd_is_the_generated_one_and_stays_if_asked_to(chart: helm.Chart, keep: bool) -> None:
    (crd,) = of_kind(render(chart, {"crds": {"keep": keep}}), "CustomResourceDefinition")
    annotations = crd["metadata"].pop("annotations", {})
    assert annotations == ({"helm.sh/resource-policy": "keep"} if keep else {})
    assert crd == yaml.safe_load((ROOT / "crds" / CRD).read_text(encoding="utf-8"))


def test_crd_can_be_left_out(chart: helm.Chart) -> None:
    assert not of_kind(render(chart, {"crds": {"enabled": False}}), "CustomResourceDefinition")


def test_charts_copy_of_the_crd_is_current() -> None:
    assert (CHART / "files" / CRD).read_bytes() == (ROOT / "crds" / CRD).read_bytes(), "run `make crds`"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replicas": "two"}}, "replicas"),
        ({"gateway": {"service": {"port": 0}}}, "port"),
        ({"gateway": {"service": {"type": "ExternalName"}}}, "type"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"image": {"tag": "a b"}}, "tag"),
        ({"namespaces": ["Team_A"]}, "namespaces"),
        ({"namespaces": "team-a"}, "namespaces"),
        ({"operator": {"prometheusUrl": "prometheus:9090"}}, "prometheusUrl"),
        ({"operator": {"tickSeconds": 0}}, "tickSeconds"),
        ({"crds": {"keep": "yes"}}, "keep"),
        ({"serviceMonitor": {"interval": "soon"}}, "interval"),
    ],
)
def test_schema_refuses_bad_values_by_name(chart: helm.Chart, values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=complaint):
        chart.validate_schema(chart.merge_values(values))


def test_schema_takes_the_defaults_and_knows_every_value(chart: helm.Chart) -> None:
    chart.validate_schema(chart.values)
    schema = chart.schema
    assert schema is not None
    assert schema["properties"].keys() - {"global"} == chart.values.keys()
    for name in ("operator", "gateway", "image", "crds", "server", "serviceMonitor"):
        assert schema["properties"][name]["properties"].keys() == chart.values[name].keys()


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_notes_say_what_to_do_next(chart: helm.Chart, values: dict[str, Any]) -> None:
    notes = chart.render(values, name="release", namespace="system")["llmservice/templates/NOTES.txt"]
    assert "kubectl --namespace system rollout status deployment/release-llmservice-operator" in notes
    assert ("port-forward" in notes) is values.get("gateway", {}).get("enabled", True)
