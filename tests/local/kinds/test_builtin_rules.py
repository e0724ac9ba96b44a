from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from kubernetes.client.models import V1Pod

from llmservice_local.api.registry import Registry, WriteOptions
from llmservice_local.errors import ApiError
from llmservice_local.kinds.builtin_rules import default_builtin, exceeded_quota, qos_class, validate_builtin
from llmservice_local.objects import requests_of


def template(**container: Any) -> dict[str, Any]:
    return {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "c", "image": "x", **container}]}}


def deployment(**spec: Any) -> dict[str, Any]:
    return {"spec": {"selector": {"matchLabels": {"app": "web"}}, "template": template(), **spec}}


def rolling(**bounds: Any) -> dict[str, Any]:
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, **bounds}}


def test_deployment_rolls_by_a_quarter_unless_it_says_otherwise() -> None:
    spec = default_builtin("Deployment", deployment())["spec"]
    assert (spec["replicas"], spec["strategy"]["rollingUpdate"]) == (1, {"maxSurge": "25%", "maxUnavailable": "25%"})
    kept = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert default_builtin("Deployment", deployment(strategy=kept))["spec"]["strategy"] == kept
    assert (
        "rollingUpdate"
        not in default_builtin("Deployment", deployment(strategy={"type": "Recreate"}))["spec"]["strategy"]
    )


def test_limits_become_requests_in_a_pod_but_not_in_a_template() -> None:
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    made = default_builtin("Deployment", deployment(template=template(resources=limits)))
    assert made["spec"]["template"]["spec"]["containers"][0]["resources"] == limits
    pod = default_builtin("Pod", {"spec": template(resources=limits)["spec"]})
    assert pod["spec"]["containers"][0]["resources"]["requests"] == {"nvidia.com/gpu": "1"}


@pytest.mark.parametrize(
    ("image", "policy"),
    [("a", "Always"), ("a:latest", "Always"), ("h:5000/a:1", "IfNotPresent"), ("h:5000/a", "Always")],
)
def test_images_without_a_fixed_tag_are_always_pulled(image: str, policy: str) -> None:
    pod = default_builtin("Pod", {"spec": {"containers": [{"name": "c", "image": image}]}})
    assert pod["spec"]["containers"][0]["imagePullPolicy"] == policy


def test_service_targets_its_own_port_unless_it_names_another() -> None:
    ports = [{"port": 80}, {"port": 81, "targetPort": "http", "protocol": "UDP"}]
    assert default_builtin("Service", {"spec": {"ports": ports}})["spec"]["ports"] == [
        {"port": 80, "protocol": "TCP", "targetPort": 80},
        {"port": 81, "protocol": "UDP", "targetPort": "http"},
    ]


def test_plain_text_of_a_secret_is_stored_as_data() -> None:
    made = default_builtin("Secret", {"stringData": {"token": "hush"}, "data": {"other": "eA=="}})
    assert made == {"type": "Opaque", "data": {"token": "aHVzaA==", "other": "eA=="}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selector": None}, "spec.selector: Required value"),
        ({"selector": {"matchLabels": {}}, "template": {"spec": {}}}, "empty selector is invalid for deployment"),
        ({"strategy": rolling(maxSurge="abc")}, 'spec.strategy.rollingUpdate.maxSurge: Invalid value: "abc"'),
        ({"strategy": rolling(maxUnavailable="101%")}, '"101%": must not be greater than 100%'),
        ({"strategy": rolling(maxSurge="0%", maxUnavailable=0)}, "may not be 0 when `maxSurge` is 0"),
        ({"strategy": {**rolling(), "type": "Recreate"}}, "spec.strategy.rollingUpdate: Forbidden"),
        ({"strategy": {"type": "Canary"}}, 'spec.strategy: Unsupported value: "Canary"'),
        ({"selector": {"matchLabels": {"app": "db"}}}, "`selector` does not match template `labels`"),
        ({"replicas": -1}, "spec.replicas: Invalid value: -1: must be greater than or equal to 0"),
        ({"template": {**template(), "spec": {"containers": []}}}, "spec.template.spec.containers: Required value"),
        ({"template": template(image="")}, "spec.template.spec.containers[0].image: Required value"),
        ({"template": template(name="C")}, 'spec.template.spec.containers[0].name: Invalid value: "C": a lowercase'),
        ({"template": template(env=[{"name": "a=b"}])}, 'containers[0].env[0].name: Invalid value: "a=b"'),
        ({"template": template(volumeMounts=[{"name": "v"}])}, 'containers[0].volumeMounts[0].name: Not found: "v"'),
        ({"template": template(readinessProbe={})}, "containers[0].readinessProbe: Required value: must specify"),
        ({"template": template(livenessProbe={"exec": {}})}, "livenessProbe.exec.command: Required value"),
        (
            {"template": template(resources={"requests": {"memory": "2Gi"}, "limits": {"memory": "1G"}})},
            'containers[0].resources.requests: Invalid value: "2Gi": must be less than or equal to memory limit of 1G',
        ),
        (
            {"template": {**template(), "spec": {**template()["spec"], "restartPolicy": "Sometimes"}}},
            'spec.template.spec.restartPolicy: Unsupported value: "Sometimes"',
        ),
    ],
)
def test_workload_that_could_not_run_is_refused(change: dict[str, Any], message: str) -> None:
    made = default_builtin("Deployment", deployment(**change))
    assert any(message in str(error) for error in validate_builtin("Deployment", made, None))


def test_surge_may_be_more_than_all_replicas() -> None:
    made = default_builtin("Deployment", deployment(strategy=rolling(maxSurge="150%")))
    assert list(validate_builtin("Deployment", made, None)) == []


def test_only_images_tolerations_and_times_of_a_pod_change() -> None:
    old = default_builtin("Pod", {"spec": template()["spec"]})
    new = default_builtin("Pod", {"spec": {**template(image="y")["spec"], "tolerations": [{"operator": "Exists"}]}})
    assert list(validate_builtin("Pod", new, old)) == []
    new = default_builtin("Pod", {"spec": template(command=["sh"])["spec"]})
    (error,) = validate_builtin("Pod", new, old)
    assert str(error).startswith("spec: Forbidden: pod updates may not change fields other than")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"volumes": [], "nodeSelector": {}, "hostNetwork": False}),
        (template(env=[])["spec"], template()["spec"]),
        (
            template(resources={"requests": {"cpu": "1000m", "memory": "1024Mi"}})["spec"],
            template(resources={"requests": {"cpu": 1, "memory": "1Gi"}})["spec"],
        ),
        ({"schedulingGates": [{"name": "a/b"}]}, {"nodeSelector": {"a": "b"}}),
    ],
)
def test_pod_in_the_form_of_another_client_is_no_change(before: dict[str, Any], after: dict[str, Any]) -> None:
    """What is empty may be left out, a quantity has many forms, and a gated pod waits for its change."""
    old, new = (default_builtin("Pod", {"spec": {**template()["spec"], **spec}}) for spec in (before, after))
    assert list(validate_builtin("Pod", new, old)) == []


def test_zero_of_a_probe_has_the_default() -> None:
    spec = template(readinessProbe={"tcpSocket": {"port": 80}, "periodSeconds": 0})["spec"]
    made = default_builtin("Pod", {"spec": spec})["spec"]["containers"][0]["readinessProbe"]
    assert made["periodSeconds"] == 10


def test_empty_text_has_the_default() -> None:
    made = default_builtin("Deployment", deployment(strategy={"type": ""}, template=template(imagePullPolicy="")))
    pod = default_builtin("Pod", {"spec": {**template()["spec"], "restartPolicy": ""}})
    assert (made["spec"]["strategy"]["type"], pod["spec"]["restartPolicy"]) == ("RollingUpdate", "Always")
    assert [*validate_builtin("Deployment", made, None), *validate_builtin("Pod", pod, None)] == []


@pytest.mark.parametrize("name", ["qwen2.5", "a" * 64, "A"])
def test_service_has_the_name_of_a_host(name: str) -> None:
    service = {"metadata": {"name": name}, "spec": {"ports": [{"port": 80}]}}
    (error,) = validate_builtin("Service", service, None)
    assert str(error).startswith(f'metadata.name: Invalid value: "{name}": a lowercase RFC 1123 label')


@pytest.mark.parametrize("key", ["a/b", "../x", "..", ".", "a b"])
@pytest.mark.parametrize("kind", ["ConfigMap", "Secret"])
def test_key_that_is_no_name_of_a_file_is_refused(kind: str, key: str) -> None:
    assert [error.path for error in validate_builtin(kind, {"data": {key: ""}}, None)] == [f"data[{key}]"]
    assert list(validate_builtin(kind, {"data": {"app.conf": "", ".env": ""}}, None)) == []


@pytest.mark.parametrize("value", ["!!", "YQ", "YQ=", "Y"])
def test_secret_that_is_not_base64_is_refused(value: str) -> None:
    registry = Registry()
    secrets = registry.kinds.find("", "v1", "secrets")
    registry.create(secrets, "default", {"metadata": {"name": "good"}, "data": {"a": "YWJj\nZA==\n"}}, WriteOptions())
    with pytest.raises(ApiError, match="illegal base64 data"):
        registry.create(secrets, "default", {"metadata": {"name": "bad"}, "data": {"a": value}}, WriteOptions())


def test_claim_without_a_size_or_a_mode_is_refused() -> None:
    errors = [str(error) for error in validate_builtin("PersistentVolumeClaim", {}, None)]
    assert errors == [
        "spec.accessModes: Required value: at least 1 access mode is required",
        "spec.resources[storage]: Required value",
    ]


def test_budget_without_a_spec_has_an_empty_one() -> None:
    assert default_builtin("PodDisruptionBudget", {})["spec"] == {}


def test_selector_of_a_deployment_never_changes() -> None:
    old = default_builtin("Deployment", deployment())
    new = default_builtin("Deployment", deployment(selector={"matchLabels": {}, "matchExpressions": []}))
    assert "spec.selector: Invalid value: field is immutable" in [
        str(e) for e in validate_builtin("Deployment", new, old)
    ]


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, "BestEffort"),
        ({"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}, "BestEffort"),
        ({"requests": {"cpu": "1"}}, "Burstable"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}}, "Guaranteed"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}, "Burstable"),
    ],
)
def test_quality_of_service(resources: dict[str, Any], expected: str) -> None:
    assert qos_class({"containers": [{"name": "c", "resources": resources}]}) == expected


def test_one_unlimited_container_makes_the_pod_burstable() -> None:
    limited = {"resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
    assert qos_class({"containers": [limited], "initContainers": [{}]}) == "Burstable"


def pod(phase: str = "Running", **requests: str) -> dict[str, Any]:
    named = {resource.replace("_", "."): amount for resource, amount in requests.items()}
    container = {"name": "c", "image": "i", "resources": {"requests": named}}
    return {"metadata": {"name": "p"}, "spec": {"containers": [container]}, "status": {"phase": phase}}


def with_init(**requests: str) -> dict[str, Any]:
    """Only its init container requests anything."""
    return pod() | {"spec": pod()["spec"] | {"initContainers": pod(**requests)["spec"]["containers"]}}


def quota(**hard: str) -> dict[str, Any]:
    named = {resource.replace("_", "."): amount for resource, amount in hard.items()}
    return {"metadata": {"name": "q"}, "spec": {"hard": named}}


@pytest.mark.parametrize(
    ("hard", "there", "says"),
    [
        pytest.param(quota(pods="2"), [pod()], None, id="room for one"),
        pytest.param(quota(pods="1"), [pod()], "requested: pods=1, used: pods=1, limited: pods=1", id="no room"),
        pytest.param(quota(pods="1"), [pod("Succeeded")], None, id="what ended does not count"),
        pytest.param(quota(requests_cpu="1"), [pod(cpu="600m")], "limited: requests.cpu=1", id="cores"),
        pytest.param(quota(requests_cpu="1"), [with_init(cpu="600m")], "used: requests.cpu=0.6", id="cores at first"),
        pytest.param(quota(requests_memory="1Gi"), [pod(cpu="600m")], None, id="nothing of that is asked for"),
    ],
)
def test_a_quota_bounds_pods_and_what_they_request(hard: dict[str, Any], there: list[Any], says: str | None) -> None:
    said = exceeded_quota(pod(cpu="500m"), there, [hard])

    assert said is None if says is None else says in str(said)


def test_a_pod_beyond_the_quota_is_forbidden() -> None:
    registry, options = Registry(), WriteOptions()
    registry.create(registry.kinds.find("", "v1", "resourcequotas"), "default", quota(pods="0"), options)

    with pytest.raises(ApiError, match='pods "p" is forbidden: exceeded quota: q') as refused:
        registry.create(registry.kinds.find("", "v1", "pods"), "default", pod(), options)

    assert refused.value.code == 403


@pytest.mark.parametrize(
    ("quantity", "why"),
    [
        ("500mi", "unable to parse quantity's suffix"),
        ("1.2.3", "quantities must match"),
        ("2 GB", "quantities must match"),
    ],
)
def test_request_that_is_no_quantity_is_refused(quantity: str, why: str) -> None:
    registry = Registry()
    with pytest.raises(ApiError, match=f"Pod in version .* cannot be handled as a Pod: {why}") as refused:
        registry.create(registry.kinds.find("", "v1", "pods"), "default", pod(memory=quantity), WriteOptions())
    assert refused.value.code == 400


@pytest.mark.parametrize(
    ("plural", "fields", "why"),
    [
        ("secrets", {"stringData": {"password": 1234}}, "stringData.password in body must be of type string"),
        ("services", {"spec": {"ports": [{"name": "http"}]}}, r"spec.ports\[0\].port: Required value"),
    ],
)
def test_object_without_what_its_defaults_come_from_is_refused(plural: str, fields: dict[str, Any], why: str) -> None:
    registry = Registry()
    with pytest.raises(ApiError, match=why) as refused:
        registry.create(
            registry.kinds.find("", "v1", plural), "default", {"metadata": {"name": "x"}, **fields}, WriteOptions()
        )
    assert refused.value.code == 422


def test_variable_may_be_set_again() -> None:
    """As charts do whose values add variables to their own."""
    registry = Registry()
    wanted = pod()
    wanted["spec"]["containers"][0]["env"] = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    made = registry.create(registry.kinds.find("", "v1", "pods"), "default", wanted, WriteOptions()).obj
    assert made["spec"]["containers"][0]["env"] == wanted["spec"]["containers"][0]["env"]


def test_quantity_may_be_a_number_without_quotes() -> None:
    registry = Registry()
    variable = {"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": 1}}}
    container = {"name": "c", "image": "i", "resources": {"requests": {"cpu": 0.5}}, "env": [variable]}
    wanted = pod() | {"spec": {"containers": [container]}}
    made = registry.create(registry.kinds.find("", "v1", "pods"), "default", wanted, WriteOptions()).obj
    assert requests_of(made)["cpu"] == Fraction(1, 2)
    V1Pod.from_dict(made)  # its model has text only
