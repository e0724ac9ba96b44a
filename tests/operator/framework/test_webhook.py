"""The webhook's certificate: created by the leader, copied by every replica, renewed in time."""

from __future__ import annotations

import base64
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509 import DNSName

from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.framework.webhook import Certificate, self_signed
from llmservice_operator.settings import WebhookSettings

JSON = "application/json"
NAME = "release-webhook"
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
SECRET = f"/api/v1/namespaces/team-a/secrets/{NAME}"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def certificate(kube: KubeClient, folder: Path, *, leads: bool = True, managed: bool = True) -> Certificate:
    folder.mkdir(exist_ok=True)
    webhook = WebhookSettings("team-a", NAME, NAME if managed else None)
    return Certificate(kube, webhook, "127.0.0.1", lambda: leads, folder)


@pytest.fixture
async def configuration(kube: KubeClient) -> None:
    service = {"name": NAME, "namespace": "team-a", "path": "/llmservices"}
    webhook = {"name": "a.example.com", "clientConfig": {"service": service}, "sideEffects": "None"}
    webhook |= {"admissionReviewVersions": ["v1"], "failurePolicy": "Ignore"}
    metadata = {"name": NAME}
    body = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    await kube.request(
        "POST", CONFIGURATIONS, body={**body, "metadata": metadata, "webhooks": [webhook]}, content_type=JSON
    )


async def secret(kube: KubeClient) -> dict[str, bytes]:
    data: dict[str, Any] = (await kube.request("GET", SECRET))["data"]
    return {name: base64.b64decode(content) for name, content in data.items()}


async def published(kube: KubeClient) -> dict[str, Any]:
    (webhook,) = (await kube.request("GET", f"{CONFIGURATIONS}/{NAME}"))["webhooks"]
    config: dict[str, Any] = webhook["clientConfig"]
    return config


@pytest.mark.usefixtures("configuration")
async def test_the_leader_creates_and_keeps_a_certificate_that_the_api_server_trusts(
    kube: KubeClient, tmp_path: Path
) -> None:
    leader = certificate(kube, tmp_path / "leader")
    await leader.keep(NOW)
    made = await secret(kube)
    writes: list[str] = []
    kube.answered = lambda method, *_: writes.append(method) if method != "GET" else None
    await leader.keep(NOW + timedelta(days=300))

    assert writes == []
    assert leader.ready.is_set()
    assert leader.key_file.stat().st_mode & 0o777 == 0o600
    assert leader.certificate_file.read_bytes() == made["tls.crt"]
    config = await published(kube)
    assert base64.b64decode(config["caBundle"]) == made["ca.crt"]
    assert config["service"]["path"] == "/llmservices", "the chart's own fields stay"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(leader.certificate_file, leader.key_file)


async def test_a_standby_copies_and_writes_nothing(kube: KubeClient, tmp_path: Path) -> None:
    standby = certificate(kube, tmp_path / "standby", leads=False)
    await standby.keep(NOW)
    assert not standby.ready.is_set()
    await certificate(kube, tmp_path / "leader").keep(NOW)
    writes: list[str] = []
    kube.answered = lambda method, *_: writes.append(method) if method != "GET" else None

    await standby.keep(NOW)

    assert writes == []
    assert standby.certificate_file.read_bytes() == (await secret(kube))["tls.crt"]


@pytest.mark.usefixtures("configuration")
async def test_it_is_renewed_a_month_before_its_end_and_the_old_one_stays_trusted(
    kube: KubeClient, tmp_path: Path
) -> None:
    leader = certificate(kube, tmp_path / "leader")
    await leader.keep(NOW)
    before = await secret(kube)

    await leader.keep(NOW + timedelta(days=340))

    after = await secret(kube)
    assert after["tls.crt"] != before["tls.crt"]
    assert after["ca.crt"] == after["tls.crt"] + before["tls.crt"]
    assert leader.certificate_file.read_bytes() == after["tls.crt"]
    assert base64.b64decode((await published(kube))["caBundle"]) == after["ca.crt"]


@pytest.mark.parametrize("broken", ["tls.crt", "tls.key"])
async def test_an_invalid_secret_is_filled_anew(broken: str, kube: KubeClient, tmp_path: Path) -> None:
    leader = certificate(kube, tmp_path / "leader")
    await leader.keep(NOW)
    await kube.request("PATCH", SECRET, body={"data": {broken: ""}})

    await leader.keep(NOW)

    assert (await secret(kube))[broken]


@pytest.mark.usefixtures("configuration")
async def test_a_secret_of_cert_manager_is_copied_and_not_written(kube: KubeClient, tmp_path: Path) -> None:
    made, key = self_signed([DNSName("any")], NOW)
    _, another = self_signed([DNSName("any")], NOW)
    body = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": {"name": NAME}}
    data = {"tls.crt": base64.b64encode(made).decode(), "tls.key": base64.b64encode(another).decode()}
    await kube.request("POST", SECRET.rpartition("/")[0], body={**body, "data": data}, content_type=JSON)
    one = certificate(kube, tmp_path / "one", managed=False)
    await one.keep(NOW)
    assert not one.ready.is_set(), "the key is another one's: kopf's server would end"

    await kube.request("PATCH", SECRET, body={"data": {"tls.key": base64.b64encode(key).decode()}})
    await one.keep(NOW)

    assert one.certificate_file.read_bytes() == made
    assert one.key_file.read_bytes() == key
    assert "caBundle" not in await published(kube)
