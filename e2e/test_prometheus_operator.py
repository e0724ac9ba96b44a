"""What a Prometheus operator reads, once its CRDs are there: comes, is put right and goes; the chart's own too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from harness.cluster import Cluster, running_cluster
from harness.kube import Kube, Object, tiny_service
from harness.prometheus_operator import GROUP, SPECS, VERSION, definition, plural
from harness.release import NAMESPACE, write_release
from harness.wait import wait_for

NAME = "watched"
CHILDREN = {"PodMonitor": "podMonitor", "PrometheusRule": "prometheusRule"}
RESYNC_S = 2
"""The CRDs come while the operator runs: what it does not watch, it finds by listing."""
VALUES: dict[str, Any] = {
    "operator": {"replicas": 1, "extraArgs": [f"--resync={RESYNC_S}"]},
    "serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "stack"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "stack"}},
}

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif("KUBECONFIG" in os.environ, reason="brings CRDs, which a given cluster may have already"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("monitored"), values=VALUES) as running:
        yield running


@pytest.fixture(scope="module")
def service(cluster: Cluster) -> str:
    """Asks for both before their CRDs are there."""
    kube = Kube(cluster)
    monitoring = dict.fromkeys(CHILDREN.values(), True) | {"labels": {"release": "stack"}}
    kube.create(tiny_service(NAME, cluster.model_uri, monitoring=monitoring, slo={"ttftP99": "2s"}))
    kube.wait_condition(NAME, "Ready", "True", timeout_s=90)
    return NAME


@pytest.fixture(scope="module")
def definitions(cluster: Cluster, service: str) -> None:
    """The CRDs, once the service serves without them."""
    kube = Kube(cluster)
    for kind in SPECS:
        client.ApiextensionsV1Api(kube.api).create_custom_resource_definition(definition(kind))
    for kind in SPECS:
        wait_for(lambda kind=kind: _served(kube, kind), 30)  # type: ignore[misc]


def _served(kube: Kube, kind: str) -> bool:
    try:
        kube.custom.list_namespaced_custom_object(GROUP, VERSION, kube.namespace, plural(kind))
    except client.ApiException as error:
        if error.status == 404:
            return False
        raise
    return True


def found(kube: Kube, kind: str) -> Object | None:
    try:
        return kube.custom.get_namespaced_custom_object(  # type: ignore[no-any-return]
            GROUP, VERSION, kube.namespace, plural(kind), NAME
        )
    except client.ApiException as error:
        if error.status == 404:
            return None
        raise


def change(kube: Kube, kind: str, patch: Object) -> None:
    kube.custom.patch_namespaced_custom_object(
        GROUP, VERSION, kube.namespace, plural(kind), NAME, patch, _content_type="application/merge-patch+json"
    )


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize("kind", CHILDREN)
def test_the_child_comes_with_its_crd_and_is_the_services_own(kube: Kube, kind: str) -> None:
    child = wait_for(lambda: found(kube, kind), 60, lambda: kube.get(NAME)["status"])
    assert child["metadata"]["labels"]["release"] == "stack"
    assert child["metadata"]["ownerReferences"][0]["name"] == NAME
    (entry,) = child["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"]) == ("llmservice-operator", "Apply")


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        ("PodMonitor", {"podMetricsEndpoints": [{"port": "metrics", "interval": "1h"}]}),
        ("PrometheusRule", {"groups": []}),
    ],
)
def test_what_is_ours_is_put_right_and_what_others_add_stays(kube: Kube, kind: str, edit: Object) -> None:
    before = wait_for(lambda: found(kube, kind), 60)

    change(kube, kind, {"metadata": {"annotations": {"note": "theirs"}}, "spec": edit})

    def put_right() -> bool:
        child = found(kube, kind)
        return child is not None and child["spec"] == before["spec"]

    wait_for(put_right, 60, lambda: found(kube, kind))
    after = found(kube, kind)
    assert after is not None
    assert after["metadata"]["annotations"]["note"] == "theirs"


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize("kind", CHILDREN)
def test_a_child_that_stands_is_not_written_again(cluster: Cluster, kube: Kube, kind: str) -> None:
    before = wait_for(lambda: found(kube, kind), 60)
    listed = _lists(cluster, kind)
    wait_for(lambda: _lists(cluster, kind) >= listed + 3, 60)
    after = found(kube, kind)
    assert after is not None
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def _lists(cluster: Cluster, kind: str) -> int:
    """How often the operator has listed the kind, by the audit log."""
    lines = (cluster.state_dir / "state" / "audit.log").read_text(encoding="utf-8").splitlines()
    asked = [(event["verb"], event["requestURI"]) for event in map(json.loads, lines)]
    return sum(verb == "list" and f"/{plural(kind)}" in uri for verb, uri in asked)


@pytest.mark.usefixtures("definitions")
@pytest.mark.parametrize("kind", CHILDREN)
def test_one_that_is_deleted_comes_back_and_goes_for_good_when_it_is_turned_off(kube: Kube, kind: str) -> None:
    uid = wait_for(lambda: found(kube, kind), 60)["metadata"]["uid"]
    kube.custom.delete_namespaced_custom_object(GROUP, VERSION, kube.namespace, plural(kind), NAME)

    def come_back() -> bool:
        child = found(kube, kind)
        return child is not None and child["metadata"]["uid"] != uid

    wait_for(come_back, 60)
    kube.patch(NAME, {"spec": {"monitoring": {CHILDREN[kind]: False}}})
    wait_for(lambda: found(kube, kind) is None, 60)
    kube.patch(NAME, {"spec": {"monitoring": {CHILDREN[kind]: True}}})
    wait_for(lambda: found(kube, kind), 60)


@pytest.mark.usefixtures("definitions")
def test_the_charts_own_are_taken_by_the_api_server_and_a_second_apply_changes_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    release = write_release(tmp_path / "release.yaml", VALUES)
    objects = [one for one in yaml.safe_load_all(release.read_text(encoding="utf-8")) if one]
    monitors = [one for one in objects if one["apiVersion"] == f"{GROUP}/{VERSION}"]
    assert sorted(one["kind"] for one in monitors) == ["PodMonitor", "PrometheusRule", "ServiceMonitor"]
    namespaced = Kube(cluster, NAMESPACE)

    def applied(manifest: Object) -> str:
        answer = namespaced.custom.patch_namespaced_custom_object(
            GROUP, VERSION, NAMESPACE, plural(manifest["kind"]), manifest["metadata"]["name"], manifest,
            field_manager="helm", field_validation="Strict", _content_type="application/apply-patch+yaml",
        )  # fmt: skip
        return str((answer or {}).get("metadata", {}).get("resourceVersion"))  # a 201 is answered with None

    for manifest in monitors:
        applied(manifest)
        assert applied(manifest) == applied(manifest) != "None"


@pytest.mark.usefixtures("definitions")
def test_they_go_with_their_service(kube: Kube) -> None:
    wait_for(lambda: all(found(kube, kind) for kind in CHILDREN), 60)
    kube.delete(NAME)
    wait_for(lambda: not any(found(kube, kind) for kind in CHILDREN), 60)
