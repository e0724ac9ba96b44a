"""Which Secrets and variables a spec may name, by the Namespace's annotation and the operator's flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmservice_local.client import Endpoint
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.grants import Grants, named_secrets, refused_environment

NAMESPACE = "/api/v1/namespaces/team-a"
USABLE = "serving.llmservice.io/usable-secrets"
HUB = {"uri": "hf://org/name", "secretRef": {"name": "hub"}}
S3 = {"uri": "s3://bucket/a", "s3": {"credentialsSecretRef": {"name": "bucket"}}}


def value_from(secret: str) -> dict[str, Any]:
    return {"name": "A", "valueFrom": {"secretKeyRef": {"name": secret, "key": "k"}}}


async def annotate(kube: KubeClient, names: str | None) -> None:
    await kube.request("PATCH", NAMESPACE, body={"metadata": {"annotations": {USABLE: names}}})


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({}, {}),
        ({"model": HUB}, {"spec.model.secretRef": "hub"}),
        ({"model": S3}, {"spec.model.s3.credentialsSecretRef": "bucket"}),
        (
            {"podTemplate": {"env": [{"name": "B", "value": "b"}, value_from("s")]}},
            {"spec.podTemplate.env[1].valueFrom.secretKeyRef": "s"},
        ),
        (
            {"podTemplate": {"envFrom": [{"configMapRef": {"name": "c"}}, {"secretRef": {"name": "s"}}]}},
            {"spec.podTemplate.envFrom[1].secretRef": "s"},
        ),
        (
            {"podTemplate": {"volumes": [{"name": "v", "secret": {"secretName": "s"}}]}},
            {"spec.podTemplate.volumes[0].secret": "s"},
        ),
        (
            {"podTemplate": {"volumes": [{"name": "v", "projected": {"sources": [{"secret": {"name": "s"}}]}}]}},
            {"spec.podTemplate.volumes[0].projected.sources[0].secret": "s"},
        ),
        (
            {"podTemplate": {"volumes": [{"name": "v", "csi": {"nodePublishSecretRef": {"name": "s"}}}]}},
            {"spec.podTemplate.volumes[0].csi.nodePublishSecretRef": "s"},
        ),
        (
            {"podTemplate": {"volumes": [{"name": "v", "azureFile": {"secretName": "s", "shareName": "a"}}]}},
            {"spec.podTemplate.volumes[0].azureFile": "s"},
        ),
        (
            {"podTemplate": {"sidecars": [{"name": "x", "env": [value_from("s")]}]}},
            {"spec.podTemplate.sidecars[0].env[0].valueFrom.secretKeyRef": "s"},
        ),
        ({"podTemplate": {"imagePullSecrets": [{"name": "s"}], "annotations": {"secretRef": "x"}}}, {}),
    ],
)
def test_every_reference_to_a_secret_is_found(spec: dict[str, Any], named: dict[str, str], service_of: Any) -> None:
    assert dict(named_secrets(service_of(**spec).spec)) == named


@pytest.mark.parametrize(
    ("annotation", "given", "allowed"),
    [
        (None, {}, False),
        ("", {}, False),
        ("other", {}, False),
        ("hub-2,hu", {}, False),
        ("other, hub", {}, True),
        ("*", {}, True),
        (None, {"team-a": ["hub"]}, True),
        (None, {"team-a": ["*"]}, True),
        (None, {"team-b": ["hub"]}, False),
    ],
)
async def test_a_secret_is_usable_where_the_annotation_or_the_operator_s_flag_lists_it(
    annotation: str | None, given: dict[str, list[str]], allowed: bool, kube: KubeClient, service_of: Any
) -> None:
    await annotate(kube, annotation)

    trouble = await Grants(kube, usable_secrets=given).refusal(service_of(model=HUB))

    assert (trouble is None) == allowed
    if trouble is not None:
        assert trouble.reason == "SecretNotAllowed"
        assert "spec.model.secretRef names the Secret hub" in trouble.message
        assert f"kubectl annotate namespace team-a --overwrite {USABLE}=" in trouble.message


async def test_both_names_of_a_reference_need_a_grant(kube: KubeClient, service_of: Any) -> None:
    await annotate(kube, "listed")
    both = {"name": "A", "valueFrom": {"secretKeyRef": {"secretName": "listed", "name": "db", "key": "k"}}}

    trouble = await Grants(kube).refusal(service_of(podTemplate={"env": [both]}))

    assert trouble is not None
    assert "names the Secret db" in trouble.message


async def test_the_remedy_includes_the_present_grants(kube: KubeClient, service_of: Any) -> None:
    await annotate(kube, "a,z")

    trouble = await Grants(kube).refusal(service_of(model=HUB))

    assert trouble is not None
    assert trouble.message.endswith(f"{USABLE}=a,hub,z")


async def test_an_annotation_is_read_once_a_minute_where_it_allows_and_each_time_where_it_does_not(
    kube: KubeClient, service_of: Any
) -> None:
    now, requests = 1000.0, []
    kube.answered = lambda method, path, *_: requests.append((method, path))
    grants = Grants(kube, clock=lambda: now)
    assert await grants.refusal(service_of()) is None
    assert requests == [], "a spec without Secrets needs none"
    assert await grants.refusal(service_of(model=HUB))
    await annotate(kube, "hub")
    requests.clear()

    for _ in range(3):
        assert await grants.refusal(service_of(model=HUB)) is None
    assert requests == [("GET", NAMESPACE)]
    await annotate(kube, None)
    now += 61

    assert await grants.refusal(service_of(model=HUB)), "the grant was withdrawn"


async def test_without_permission_to_read_namespaces_the_flag_alone_counts(kube: KubeClient, service_of: Any) -> None:
    await annotate(kube, "hub")
    requests: list[str] = []
    kube.answered = lambda _, path, *__: requests.append(path)

    trouble = await Grants(kube, False, {"team-a": ["other"]}).refusal(service_of(model=HUB))

    assert requests == []
    assert trouble is not None
    assert trouble.message.endswith("can set operator.usableSecrets.team-a to [hub,other]")


async def test_a_namespace_that_cannot_be_read_grants_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service_of: Any
) -> None:
    Endpoint("http://127.0.0.1:9").write_kubeconfig(tmp_path / "away")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "away"))
    client = await KubeClient.connect()

    with pytest.raises(KubeError):
        await Grants(client).refusal(service_of(model=HUB))

    await client.close()


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("PYTHONPATH", (), True),
        ("PYTHONUNBUFFERED", (), False),
        ("LD_PRELOAD", (), True),
        ("HTTPS_PROXY", (), True),
        ("https_proxy", (), True),
        ("no_proxy", ("*_PROXY",), False),
        ("HTTPS_PROXY", ("HTTPS_PROXY",), False),
        ("HTTP_PROXY", ("HTTPS_PROXY",), True),
        ("SSL_CERT_FILE", (), True),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", (), True),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", (), True),
        ("OTEL_SERVICE_NAME", (), False),
        ("MODEL_PROXY_NAME", (), False),
    ],
)
def test_guarded_variables_need_a_grant(name: str, allowed: tuple[str, ...], refused: bool, service_of: Any) -> None:
    spec = service_of(podTemplate={"env": [{"name": "A", "value": "1"}, {"name": name, "value": "x"}]}).spec

    trouble = refused_environment(spec, allowed)

    assert (trouble is not None) == refused
    if trouble is not None:
        assert trouble.reason == "EnvNotAllowed"
        assert name in trouble.message
        assert "operator.allowedEnv" in trouble.message
