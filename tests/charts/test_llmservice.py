"""The chart, linted, rendered and schema-checked by Helm itself (as a library: no binary is needed)."""

from __future__ import annotations

import argparse
import base64
import json
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_gateway.access.keys import KEY_LABEL, digest_of, read_keys
from llmservice_gateway.metrics import GatewayMetrics
from llmservice_local.selector import label_predicate
from llmservice_operator.api.labels import GATEWAYS
from llmservice_operator.settings import OperatorSettings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "llmservice"
CRD = "llmservices.serving.llmservice.io.yaml"

GATEWAY_METRICS = {metric.name for metric in GatewayMetrics().registry.collect()}
VALUES: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "values").iterdir())
}
RENDERED: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture(scope="module")
def chart() -> Iterator[helm.Chart]:
    with helm.Chart.load(CHART) as loaded:
        yield loaded
    RENDERED.clear()


def render(chart: helm.Chart, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Rendered once for all tests that ask for these values."""
    key = json.dumps(values)
    if key not in RENDERED:
        files = chart.render(values, name="release", namespace="system")
        manifests = [yaml.load_all(text, yaml.CSafeLoader) for path, text in files.items() if path.endswith(".yaml")]
        RENDERED[key] = [manifest for file in manifests for manifest in file if manifest]
    return RENDERED[key]


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


def test_versions_with_build_metadata_give_valid_labels_and_tags(tmp_path: Path) -> None:
    """As Flux's reconcileStrategy: Revision makes them."""
    copied = Path(shutil.copytree(CHART, tmp_path / "llmservice"))
    described = copied / "Chart.yaml"
    described.write_text(re.sub(r"(?m)^(version|appVersion): .*", rf"\1: 1.2.3+{'a1b2' * 20}", described.read_text()))

    with helm.Chart.load(copied) as loaded:
        files = loaded.render({}, name="release", namespace="system")

    deployment = yaml.safe_load(files["llmservice/templates/operator-deployment.yaml"])
    labels = deployment["metadata"]["labels"]
    allowed = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
    assert labels["helm.sh/chart"].startswith("llmservice-1.2.3_a1b2")
    assert [value for value in labels.values() if not allowed.fullmatch(value)] == []
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"].rpartition(":")[2].startswith("1.2.3_a1b2")


def pods_of(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The specs of all pods, that of `helm test` included."""
    templates = [deployment["spec"]["template"]["spec"] for deployment in of_kind(manifests, "Deployment")]
    return templates + [pod["spec"] for pod in of_kind(manifests, "Pod")]


def test_pods_meet_the_restricted_pod_security_standard(manifests: list[dict[str, Any]]) -> None:
    pods = pods_of(manifests)
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all(volume.keys() - {"name"} <= {"emptyDir", "configMap", "secret"} for volume in pod.get("volumes", []))
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
        assert selected == [service["metadata"]["name"].replace("-webhook", "-operator")]
    for labels in pods.values():
        assert labels["app.kubernetes.io/name"] != "llmservice", "the name that every LLMService's pods carry"


def test_roles_have_no_wildcard_and_no_secret_but_the_webhooks_and_the_keys(manifests: list[dict[str, Any]]) -> None:
    roles = of_kind(manifests, "Role", "ClusterRole")
    assert roles
    for role in [role for role in roles if role["metadata"]["name"] == "release-llmservice-gateway-keys"]:
        assert (role["kind"], role["metadata"]["namespace"]) == ("Role", "system")
        assert role["rules"] == [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["list", "watch"]}]
        roles.remove(role)
    for rule in (rule for role in roles for rule in role["rules"]):
        assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]
        if rule["resources"] == ["secrets"]:  # none exists when it is created: only that can't be restricted by name
            assert rule["verbs"] == ["create"] or rule["resourceNames"] == ["release-llmservice-webhook"]
            continue
        assert not {"secrets", "pods/exec", "roles", "rolebindings", "clusterroles"} & set(rule["resources"])
        assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])


def test_gateway_may_only_read(manifests: list[dict[str, Any]]) -> None:
    for role in of_kind(manifests, "Role", "ClusterRole"):
        if role["metadata"]["name"].endswith("-gateway"):
            assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"list", "watch"}


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
    for pod in pods_of(manifests):
        (container,) = pod["containers"]
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


def test_what_tenants_may_name_reaches_the_operator(chart: helm.Chart) -> None:
    operator = named(render(chart, VALUES["everything"]), "Deployment", "release-llmservice-operator")
    args = operator["spec"]["template"]["spec"]["containers"][0]["args"]
    wanted = ["--usable-secrets=team-a=hf-token,model-bucket", "--usable-secrets=team-b=*"]
    assert [flag for flag in args if flag.startswith("--usable-secrets")] == wanted
    assert [flag for flag in args if flag.startswith("--allow-env")] == [
        "--allow-env=HTTPS_PROXY",
        "--allow-env=OTEL_*",
    ]
    assert "--share-hf-token" in args


def test_empty_lists_grant_nothing(chart: helm.Chart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAMESPACE", "llmservice")
    values = {"operator": {"usableSecrets": {"team-a": []}, "prometheusPeers": []}}
    operator = named(render(chart, values), "Deployment", "release-llmservice-operator")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    parser = argparse.ArgumentParser()
    OperatorSettings.add_arguments(parser)
    settings = OperatorSettings.of(parser.parse_args(container["args"][1:]))
    assert (settings.usable_secrets(), settings.peers().prometheus) == ({}, ())


def test_images_take_registry_and_tag_and_the_operator_is_told_the_servers(chart: helm.Chart) -> None:
    operator = named(render(chart, VALUES["everything"]), "Deployment", "release-llmservice-operator")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.com/ml/llmservice-operator:1.2.3"
    assert "--server-image=registry.example.com/ml/llmservice-server:1.2.3" in container["args"]
    assert "--prometheus-url=http://prometheus.monitoring.svc:9090" in container["args"]
    assert operator["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "pull"}]


def test_of_two_operators_only_the_holder_of_the_lease_works(chart: helm.Chart) -> None:
    manifests = render(chart, {})
    operator = named(manifests, "Deployment", "release-llmservice-operator")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    role = named(manifests, "Role", "release-llmservice-operator-lease")

    assert operator["spec"]["replicas"] == 2
    assert operator["spec"]["strategy"]["type"] == "RollingUpdate"
    assert "--leader-elect" in container["args"]
    assert "--lease-name=release-llmservice-operator" in container["args"]
    assert container["env"][0]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
    assert role["metadata"]["namespace"] == "system"
    assert role["rules"][1]["resourceNames"] == ["release-llmservice-operator"]


def test_the_operator_lists_the_gateways_pods_in_its_own_namespace_alone(chart: helm.Chart) -> None:
    manifests = render(chart, {"namespaces": ["team-a"]})
    role = named(manifests, "Role", "release-llmservice-operator-lease")
    gateway = named(manifests, "Deployment", "release-llmservice-gateway")

    assert {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]} in role["rules"]
    assert label_predicate(GATEWAYS)(gateway["spec"]["template"])
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    assert "metrics" in {port["name"] for port in container["ports"]}


def test_gateways_grace_period_is_longer_than_its_drain(chart: helm.Chart) -> None:
    gateway = named(
        render(chart, {"gateway": {"drainTimeoutSeconds": 300}}), "Deployment", "release-llmservice-gateway"
    )
    pod = gateway["spec"]["template"]["spec"]
    assert "--drain-timeout=300" in pod["containers"][0]["args"]
    assert pod["terminationGracePeriodSeconds"] > 300 + 5


def test_common_labels_reach_every_object_and_pod(chart: helm.Chart) -> None:
    manifests = render(chart, VALUES["everything"])
    for manifest in manifests:
        if manifest["kind"] != "CustomResourceDefinition":
            assert manifest["metadata"]["labels"]["team"] == "ml"
    for deployment in of_kind(manifests, "Deployment"):
        assert deployment["spec"]["template"]["metadata"]["labels"]["team"] == "ml"
        assert "team" not in deployment["spec"]["selector"]["matchLabels"], "a selector can't be changed later"


def test_pods_run_where_the_values_say(chart: helm.Chart) -> None:
    operator = named(render(chart, VALUES["everything"]), "Deployment", "release-llmservice-operator")
    template = operator["spec"]["template"]
    assert template["metadata"]["labels"]["mesh"] == "off"
    pod, values = template["spec"], VALUES["everything"]["operator"]
    for field in ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "priorityClassName"):
        assert pod[field] == values[field]


def test_pods_spread_over_nodes_where_that_is_possible(chart: helm.Chart) -> None:
    for deployment in of_kind(render(chart, {}), "Deployment"):
        (spread,) = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
        assert spread["labelSelector"] == {"matchLabels": deployment["spec"]["selector"]["matchLabels"]}


def test_network_policies_open_the_ports_of_their_pods_and_no_other(manifests: list[dict[str, Any]]) -> None:
    deployments = {deployment["metadata"]["name"]: deployment for deployment in of_kind(manifests, "Deployment")}
    policies = of_kind(manifests, "NetworkPolicy")
    assert {policy["metadata"]["name"] for policy in policies} == deployments.keys()
    for policy in policies:
        deployment = deployments[policy["metadata"]["name"]]
        assert policy["spec"]["podSelector"] == deployment["spec"]["selector"]
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        rules = policy["spec"]["ingress"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        named = {port["name"] for port in container["ports"]}
        opened = {port["port"] for rule in rules for port in rule["ports"]}
        assert opened == named - {"health"}, "the kubelet's probes are always let in"


def test_the_webhook_can_never_hold_up_an_apply_and_reaches_the_operators_pods(chart: helm.Chart) -> None:
    manifests = render(chart, {})
    (configuration,) = of_kind(manifests, "ValidatingWebhookConfiguration")
    (webhook,) = configuration["webhooks"]
    assert webhook["failurePolicy"] == "Ignore"
    assert webhook["sideEffects"] == "None"
    reference = webhook["clientConfig"]["service"]
    (port,) = named(manifests, "Service", reference["name"])["spec"]["ports"]
    assert port["port"] == reference["port"]
    operator = named(manifests, "Deployment", "release-llmservice-operator")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    assert {"name": port["targetPort"], "containerPort": 9443} in container["ports"]
    assert f"--webhook={reference['name']}" in container["args"]
    assert f"--webhook-configuration={configuration['metadata']['name']}" in container["args"]


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({"admission": {"enabled": False}}, set()),
        ({"namespaces": ["team-a"]}, set()),
        ({}, {"ValidatingWebhookConfiguration"}),
        (
            {"namespaces": ["team-a"], "admission": {"certManager": {"enabled": True}}},
            {"ValidatingWebhookConfiguration", "Certificate", "Issuer"},
        ),
        (
            {"admission": {"certManager": {"enabled": True, "issuerRef": {"name": "own", "kind": "ClusterIssuer"}}}},
            {"ValidatingWebhookConfiguration", "Certificate"},
        ),
    ],
    ids=["off", "namespaces without cert-manager", "self-signed", "cert-manager", "an issuer of the cluster"],
)
def test_one_value_turns_the_webhook_off_and_another_lets_cert_manager_sign(
    values: dict[str, Any], kinds: set[str], chart: helm.Chart
) -> None:
    manifests = render(chart, values)
    webhooks = of_kind(manifests, "ValidatingWebhookConfiguration", "Certificate", "Issuer")
    assert {one["kind"] for one in webhooks} == kinds
    operator = named(manifests, "Deployment", "release-llmservice-operator")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    assert any(argument.startswith("--webhook=") for argument in container["args"]) == bool(kinds)
    signed = any(argument.startswith("--webhook-configuration=") for argument in container["args"])
    assert signed == (kinds == {"ValidatingWebhookConfiguration"})


def test_only_the_peers_of_the_values_and_helm_test_reach_the_pods(chart: helm.Chart) -> None:
    manifests = render(chart, VALUES["everything"])
    operator = named(manifests, "NetworkPolicy", "release-llmservice-operator")
    assert operator["spec"]["ingress"][0]["from"] == [{"namespaceSelector": {}}]
    gateway = named(manifests, "NetworkPolicy", "release-llmservice-gateway")
    requests, metrics = gateway["spec"]["ingress"]
    theirs, test = requests["from"]
    assert theirs == {"podSelector": {}}
    (pod,) = of_kind(manifests, "Pod")
    assert test["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    prometheus, asks_what_is_held = metrics["from"]
    assert prometheus == {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    labels = named(manifests, "Deployment", "release-llmservice-operator")["spec"]["template"]["metadata"]["labels"]
    assert asks_what_is_held["podSelector"]["matchLabels"].items() <= labels.items()


def test_gateways_metrics_have_a_port_that_its_service_does_not_have(chart: helm.Chart) -> None:
    manifests = render(chart, VALUES["everything"])
    deployment = named(manifests, "Deployment", "release-llmservice-gateway")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {"--port=8080", "--metrics-port=8001"} <= set(container["args"])
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"http": 8080, "metrics": 8001}
    service = named(manifests, "Service", "release-llmservice-gateway")
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]
    policy = named(manifests, "NetworkPolicy", "release-llmservice-gateway")
    assert [[port["port"] for port in rule["ports"]] for rule in policy["spec"]["ingress"]] == [["http"], ["metrics"]]
    (monitor,) = of_kind(manifests, "PodMonitor")
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_helm_test_asks_the_gateways_service(chart: helm.Chart) -> None:
    manifests = render(chart, {"gateway": {"service": {"port": 8000}}})
    (pod,) = of_kind(manifests, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    service = named(manifests, "Service", "release-llmservice-gateway")
    (container,) = pod["spec"]["containers"]
    assert container["args"] == ["check", f"http://{service['metadata']['name']}.system.svc:8000"]


def test_rules_are_those_that_prometheus_was_tested_with(chart: helm.Chart) -> None:
    assert not of_kind(render(chart, {}), "PrometheusRule")
    (rule,) = of_kind(render(chart, VALUES["everything"]), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text(encoding="utf-8"))
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_namespace_of_an_llmservice_survives_the_scrape_of_the_operator(chart: helm.Chart) -> None:
    (monitor,) = of_kind(render(chart, VALUES["everything"]), "ServiceMonitor")
    assert monitor["metadata"]["name"] == "release-llmservice-operator"
    assert monitor["spec"]["endpoints"][0]["honorLabels"] is True


def test_own_objects_are_templates_given_as_objects_or_as_text(chart: helm.Chart) -> None:
    text = "apiVersion: v1\nkind: Secret\nmetadata: {name: {{ .Release.Name }}-text}\n"
    manifests = render(chart, {"extraObjects": [*VALUES["everything"]["extraObjects"], text]})
    assert named(manifests, "ConfigMap", "release-own")["data"] == {"in": "release"}
    assert named(manifests, "Secret", "release-text")


def test_budget_is_left_out_where_it_would_block_a_drain(chart: helm.Chart) -> None:
    budgets = of_kind(render(chart, {}), "PodDisruptionBudget")
    assert [each["spec"]["unhealthyPodEvictionPolicy"] for each in budgets] == ["AlwaysAllow", "AlwaysAllow"]
    alone = {"gateway": {"replicas": 1}, "operator": {"replicas": 1}}
    assert not of_kind(render(chart, alone), "PodDisruptionBudget")


def test_a_budget_counts_the_least_that_the_autoscaler_leaves(chart: helm.Chart) -> None:
    for least, budgets in ((1, 0), (2, 1)):
        gateway = {"replicas": 3, "autoscaling": {"enabled": True, "minReplicas": least}}
        manifests = render(chart, {"gateway": gateway, "operator": {"replicas": 1}})
        assert len(of_kind(manifests, "PodDisruptionBudget")) == budgets


def test_the_autoscaler_counts_the_requests_that_the_gateways_answer_and_owns_their_replicas(chart: helm.Chart) -> None:
    assert not of_kind(render(chart, {}), "HorizontalPodAutoscaler")
    manifests = render(chart, VALUES["edge"])
    (scaler,) = of_kind(manifests, "HorizontalPodAutoscaler")
    gateway = named(manifests, "Deployment", scaler["spec"]["scaleTargetRef"]["name"])
    assert "replicas" not in gateway["spec"], "an upgrade would undo the autoscaler's decision"
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in GATEWAY_METRICS
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "100"}
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (3, 20)
    assert scaler["spec"]["behavior"] == {"scaleDown": {"stabilizationWindowSeconds": 600}}


def test_a_certificate_makes_the_gateway_serve_https_alone(chart: helm.Chart) -> None:
    manifests = render(chart, VALUES["edge"])
    pod = named(manifests, "Deployment", "release-llmservice-gateway")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    flags = dict(flag.split("=", 1) for flag in container["args"][1:])
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "tls"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "tls"]
    assert volume["secret"]["secretName"] == "gateway-tls"
    assert mount["readOnly"]
    assert {flags["--tls-cert"], flags["--tls-key"]} == {f"{mount['mountPath']}/tls.{end}" for end in ("crt", "key")}
    probes = [container[probe]["httpGet"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {probe["scheme"] for probe in probes} == {"HTTPS"}
    (test,) = of_kind(manifests, "Pod")
    assert test["spec"]["containers"][0]["args"][1].startswith("https://")
    assert "--insecure" in test["spec"]["containers"][0]["args"]


def test_limits_and_origins_reach_the_gateway(chart: helm.Chart) -> None:
    gateway = named(render(chart, VALUES["edge"]), "Deployment", "release-llmservice-gateway")
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    assert {
        "--read-timeout=300",
        "--client-timeout=30",
        "--hold-timeout=120",
        "--max-held-requests=50",
        "--max-held-mib=64",
        "--cors-allow-origin=https://chat.example.com",
    } <= set(container["args"])


def test_a_million_is_passed_on_as_the_flags_take_it(chart: helm.Chart) -> None:
    """Helm's numbers are floats, which it would write as 1e+06."""
    values = {"gateway": {"hold": {"maxRequests": 1_000_000, "maxMiB": 1_000_000}}}
    gateway = named(render(chart, values), "Deployment", "release-llmservice-gateway")
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    assert {"--max-held-requests=1000000", "--max-held-mib=1000000"} <= set(container["args"])


def test_keys_reach_the_gateway_and_their_public_half_alone_the_operator(chart: helm.Chart) -> None:
    redis = {"secretName": "redis"}
    keys = {"enabled": True, "signingSecretName": "signing", "redis": redis}
    manifests = render(chart, {"gateway": {"replicas": 3, "keys": keys}})
    gateway, operator = (
        named(manifests, "Deployment", f"release-llmservice-{part}")["spec"]["template"]["spec"]
        for part in ("gateway", "operator")
    )
    (container,) = gateway["containers"]
    assert {"--keys-namespace=system", "--replicas=3"} < set(container["args"])
    assert "--signing-keys=/etc/llmservice/signing/signing-keys.yaml" in container["args"]
    reference = {"secretKeyRef": {"name": "redis", "key": "url"}}
    assert container["env"] == [{"name": "LLMSERVICE_REDIS_URL", "valueFrom": reference}]
    assert "--gateway-public-keys=/etc/llmservice/gateway/public-keys.pem" in operator["containers"][0]["args"]
    for pod, field in ((gateway, "signing-keys.yaml"), (operator, "public-keys.pem")):
        (volume,) = [one["secret"] for one in pod["volumes"] if one.get("secret", {}).get("secretName") == "signing"]
        assert volume["items"] == [{"key": field, "path": field}]


PARTS: dict[str, dict[str, Any]] = {
    "tls": {"tls": {"secretName": "tls"}},
    "ingress": {"ingress": {"enabled": True}},
    "route": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}},
    "autoscaling": {"autoscaling": {"enabled": True}},
    "one replica": {"replicas": 1},
    "no budget": {"podDisruptionBudget": False},
    "environment": {"env": [{"name": "A", "value": "b"}]},
    "origins": {"corsAllowOrigins": ["https://a.example", "https://b.example"]},
}
KEYS: list[dict[str, Any]] = [
    {"enabled": True} | signing | redis
    for signing in ({}, {"signingSecretName": "s"}, {"signingSecretName": "s", "signaturesRequired": False})
    for redis in ({}, {"redis": {"url": "rediss://redis:6379/1"}}, {"redis": {"secretName": "redis"}})
]


@pytest.mark.slow
@given(
    st.sets(st.sampled_from(sorted(PARTS))),
    st.sampled_from([{}, *KEYS]),
    st.sampled_from([[], ["team-a"]]),
    st.booleans(),
)
@settings(max_examples=25)
def test_the_parts_of_the_gateway_work_in_any_combination(
    parts: set[str], keys: dict[str, Any], namespaces: list[str], restricted: bool
) -> None:
    gateway: dict[str, Any] = {"keys": keys}
    for part in parts:
        gateway |= PARTS[part]
    peers = [{"podSelector": {}}] if restricted else []
    values = {"gateway": gateway, "namespaces": namespaces, "networkPolicy": {"gatewayMetricsFrom": peers}}
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        files = chart.render(values, name="release", namespace="system")
    manifests = [
        manifest
        for path, text in files.items()
        if path.endswith(".yaml")
        for manifest in yaml.load_all(text, yaml.CSafeLoader)
        if manifest
    ]
    test_every_object_is_named_once_and_labelled(manifests)
    test_pods_meet_the_restricted_pod_security_standard(manifests)
    test_commands_of_the_pods_take_their_arguments(manifests)
    test_bindings_name_an_existing_role_and_account(manifests)
    test_network_policies_open_the_ports_of_their_pods_and_no_other(manifests)
    for pod in pods_of(manifests):
        (container,) = pod["containers"]
        mounts = [mount["name"] for mount in container.get("volumeMounts", [])]
        assert sorted(mounts) == sorted(volume["name"] for volume in pod.get("volumes", []))
        files_named = [arg.partition("=")[2] for arg in container["args"] if "=/" in arg]
        folders = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
        assert all(file.rpartition("/")[0] in folders for file in files_named)
        names = [variable["name"] for variable in container.get("env", [])]
        assert len(names) == len(set(names))


def test_signing_can_begin_before_pods_require_it(chart: helm.Chart) -> None:
    keys = {"enabled": True, "signingSecretName": "signing", "signaturesRequired": False}
    manifests = render(chart, {"gateway": {"keys": keys}})
    gateway, operator = (
        named(manifests, "Deployment", f"release-llmservice-{part}")["spec"]["template"]["spec"]
        for part in ("gateway", "operator")
    )
    assert "--signing-keys=/etc/llmservice/signing/signing-keys.yaml" in gateway["containers"][0]["args"]
    assert not [arg for arg in operator["containers"][0]["args"] if arg.startswith("--gateway-public-keys")]
    assert [volume["name"] for volume in operator["volumes"]] == ["tmp"]


def test_examples_of_the_gateway_are_what_chart_and_gateway_take(chart: helm.Chart) -> None:
    folder = ROOT / "examples" / "gateway"
    key, redis, values = (
        yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in ("api-key", "redis", "values")
    )
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in key["stringData"].items()}
    keys, problems = read_keys([key | {"data": encoded}])
    assert problems == {}
    assert key["metadata"]["labels"] == {KEY_LABEL: "true"}
    assert keys[digest_of("sk-llmservice-example")].policy.monthly_tokens == 500_000_000
    gateway = named(render(chart, values), "Deployment", "release-llmservice-gateway")["spec"]["template"]["spec"]
    (url,) = [one["valueFrom"]["secretKeyRef"] for one in gateway["containers"][0]["env"]]
    assert url["name"] == redis["metadata"]["name"]
    assert url["key"] in redis["stringData"]


def test_replicas_of_an_autoscaled_gateway_are_the_most(chart: helm.Chart) -> None:
    gateway = {"keys": {"enabled": True}, "autoscaling": {"enabled": True, "maxReplicas": 7}}
    deployment = named(render(chart, {"gateway": gateway}), "Deployment", "release-llmservice-gateway")
    assert "--replicas=7" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "The gateway is open: whoever reaches it may use every model"),
        ({"enabled": True}, "Pods can be called around the gateway"),
        ({"enabled": True, "signingSecretName": "s"}, "Every request needs an API key"),
    ],
)
def test_notes_say_whether_keys_are_required(chart: helm.Chart, keys: dict[str, Any], words: str) -> None:
    rendered = chart.render({"gateway": {"keys": keys}}, name="release", namespace="system")
    assert words in rendered["llmservice/templates/NOTES.txt"]


def test_ingress_and_route_lead_to_the_gateways_service(chart: helm.Chart) -> None:
    assert not of_kind(render(chart, {}), "Ingress", "HTTPRoute")
    manifests = render(chart, VALUES["edge"])
    service = named(manifests, "Service", "release-llmservice-gateway")
    (ingress,) = of_kind(manifests, "Ingress")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], ingress["spec"]["ingressClassName"]) == ("llm.example.com", "nginx")
    assert ingress["spec"]["tls"] == [{"hosts": ["llm.example.com"], "secretName": "llm-example-com"}]
    assert path["backend"]["service"]["name"] == service["metadata"]["name"]
    assert path["backend"]["service"]["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
    (route,) = of_kind(manifests, "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}, "a stream may take as long as it takes"
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}]
    assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "gateways", "sectionName": "https"}]


def test_an_ingress_without_a_host_takes_every_host(chart: helm.Chart) -> None:
    (ingress,) = of_kind(render(chart, {"gateway": {"ingress": {"enabled": True}}}), "Ingress")
    (rule,) = ingress["spec"]["rules"]
    assert "host" not in rule
    assert not {"tls", "ingressClassName"} & ingress["spec"].keys()


@pytest.mark.parametrize(
    ("gateway", "complaint"),
    [
        ({"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 4}}, "maxReplicas is 4.*minReplicas, 5"),
        ({"ingress": {"enabled": True, "tlsSecretName": "t"}}, r"set gateway\.ingress\.host"),
        ({"httpRoute": {"enabled": True}}, "name the Gateways"),
        ({"keys": {"signingSecretName": "s"}}, r"set gateway\.keys\.enabled as well"),
        ({"keys": {"redis": {"url": "redis://r"}}}, r"set gateway\.keys\.enabled as well"),
        ({"keys": {"enabled": True, "redis": {"url": "redis://r", "secretName": "s"}}}, "both url and secretName"),
    ],
)
def test_values_that_cannot_work_together_are_refused_with_what_to_do(
    chart: helm.Chart, gateway: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(helm.HelmError, match=complaint):
        chart.render({"gateway": gateway}, name="release", namespace="system")


def test_gateway_can_be_left_out(chart: helm.Chart) -> None:
    manifests = render(chart, VALUES["no-gateway"])
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
        ({"prometheusRule": {"enabled": 1}}, "enabled"),
        ({"commonLabels": {"app.kubernetes.io/name": "mine"}}, "commonLabels"),
        ({"operator": {"podLabels": {"a": 1}}}, "podLabels"),
        ({"operator": {"tickSeconds": 61}}, "tickSeconds"),
        ({"operator": {"prometheusPeers": ["monitoring:prometheus"]}}, "prometheusPeers"),
        ({"networkPolicy": {"gatewayFrom": {"podSelector": {}}}}, "gatewayFrom"),
        ({"networkPolicy": {"gatewayMetricsFrom": ["monitoring"]}}, "gatewayMetricsFrom"),
        ({"extraObjects": [3]}, "extraObjects"),
        ({"gateway": {"autoscaling": {"requestsPerReplica": 0}}}, "requestsPerReplica"),
        ({"gateway": {"clientTimeoutSeconds": "1m"}}, "clientTimeoutSeconds"),
        ({"gateway": {"httpRoute": {"requestTimeout": "none"}}}, "requestTimeout"),
        ({"gateway": {"ingress": {"hosts": ["a"]}}}, "hosts"),
        ({"gateway": {"keys": {"redis": {"url": "redis://:hush@redis:6379"}}}}, "url"),
    ],
)
def test_schema_refuses_bad_values_by_name(chart: helm.Chart, values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=complaint):
        chart.validate_schema(chart.merge_values(values))


def test_schema_takes_the_defaults(chart: helm.Chart) -> None:
    chart.validate_schema(chart.values)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_notes_say_what_to_do_next(chart: helm.Chart, values: dict[str, Any]) -> None:
    notes = chart.render(values, name="release", namespace="system")["llmservice/templates/NOTES.txt"]
    assert "kubectl --namespace system rollout status deployment/release-llmservice-operator" in notes
    assert ("port-forward" in notes) is values.get("gateway", {}).get("enabled", True)


def test_who_may_edit_a_namespace_may_edit_its_services(chart: helm.Chart) -> None:
    manifests = render(chart, {})
    view, edit = (named(manifests, "ClusterRole", f"release-llmservice-{name}") for name in ("view", "edit"))
    aggregated = "rbac.authorization.k8s.io/aggregate-to-"
    assert {f"{aggregated}{name}" for name in ("view", "edit", "admin")} <= set(view["metadata"]["labels"])
    assert f"{aggregated}view" not in edit["metadata"]["labels"]
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert {verb for rule in edit["rules"] for verb in rule["verbs"]} >= {"create", "update", "patch", "delete"}
