"""The chart installed, upgraded and removed by Helm, in an API server that validates what it is given."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import helm_python as helm
import pytest
import yaml

from llmservice_local.api.serve import serve_api

CHART = Path(__file__).parents[2] / "charts" / "llmservice"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/llmservices.serving.llmservice.io"
DEPLOYMENTS = "/apis/apps/v1/namespaces/system/deployments"
LLMSERVICES = "/apis/serving.llmservice.io/v1alpha1/namespaces/default/llmservices"


class Cluster:
    """Helm, and a look at what it did. Releases are kept in memory: the emulated API takes no protobuf."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        cluster = {"name": "loopback", "cluster": {"server": url}}
        context = {"name": "loopback", "context": {"cluster": "loopback", "user": "me"}}
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "loopback",
            "contexts": [context],
            "clusters": [cluster],
            "users": [{"name": "me", "user": {}}],
        }
        self.url = url
        self.session = session
        self.helm = helm.Config(
            kubeconfig_content=yaml.safe_dump(kubeconfig), namespace="system", storage_driver="memory"
        )

    async def run(self, action: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        """An action of Helm's, beside the event loop that answers it."""
        done: dict[str, Any] = await asyncio.to_thread(getattr(self.helm, action), *arguments, **options)
        return done

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def create(self, path: str, manifest: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        query = {"fieldValidation": "Strict"}
        async with self.session.post(self.url + path, json=manifest, params=query) as response:
            return response.status, await response.json()

    async def aclose(self) -> None:
        self.helm.close()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with serve_api() as api, aiohttp.ClientSession() as session, aclosing(Cluster(api.url, session)) as cluster:
        yield cluster


async def test_release_is_installed_upgraded_and_removed_and_services_outlive_it(cluster: Cluster) -> None:
    release = await cluster.run("install", CHART, "release", {}, create_namespace=True)
    assert release["status"] == "deployed"
    _, deployments = await cluster.get(DEPLOYMENTS)
    assert len(deployments["items"]) == 2

    status, refused = await cluster.create(LLMSERVICES, _in_the_notes(release["notes"]))
    assert status == 201, refused

    await cluster.run("upgrade", CHART, "release", {"gateway": {"enabled": False}})
    _, deployments = await cluster.get(DEPLOYMENTS)
    assert [item["metadata"]["name"] for item in deployments["items"]] == ["release-llmservice-operator"]

    await cluster.run("uninstall", "release")
    _, deployments = await cluster.get(DEPLOYMENTS)
    assert deployments["items"] == []
    assert (await cluster.get(CRD))[0] == 200
    _, services = await cluster.get(LLMSERVICES)
    assert [item["metadata"]["name"] for item in services["items"]] == ["qwen"]


async def test_crd_goes_with_the_release_where_it_is_not_to_be_kept(cluster: Cluster) -> None:
    await cluster.run("install", CHART, "release", {"crds": {"keep": False}}, create_namespace=True)
    assert (await cluster.get(CRD))[0] == 200
    await cluster.run("uninstall", "release")
    assert (await cluster.get(CRD))[0] == 404


async def test_bad_values_change_nothing(cluster: Cluster) -> None:
    with pytest.raises(helm.HelmError, match="replicas"):
        await cluster.run("install", CHART, "release", {"gateway": {"replicas": -1}}, create_namespace=True)
    assert (await cluster.get(CRD))[0] == 404


def _in_the_notes(notes: str) -> dict[str, Any]:
    """The manifest that the notes tell the user to apply."""
    found = re.search(r"<<MANIFEST\n(.*?)\n *MANIFEST", notes, re.DOTALL)
    assert found
    manifest: dict[str, Any] = yaml.safe_load(found[1])
    return manifest
