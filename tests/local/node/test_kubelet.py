"""A node's pods, with the emulated API."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llmservice_local.api.registry import DeleteOptions, WriteOptions
from llmservice_local.api.serve import serve_api
from llmservice_local.client import Endpoint, connect
from llmservice_local.control.informer import Informers
from llmservice_local.node.kubelet import Kubelet, NodeSettings

pytestmark = pytest.mark.slow


async def test_a_pod_that_was_deleted_before_its_node_saw_it_is_removed_and_never_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    container = {"name": "c", "image": "none", "command": ["touch", str(started)]}
    pod = {"metadata": {"name": "short"}, "spec": {"nodeName": "local", "containers": [container]}}
    async with serve_api() as api, connect(Endpoint(api.url), "test") as client:
        pods = api.registry.kinds.find("", "v1", "pods")
        informers = Informers(client)
        node = Kubelet(client, informers, NodeSettings(tmp_path))
        running = asyncio.create_task(node.run())
        try:
            async with asyncio.timeout(20):
                await node.registered.wait()
                api.registry.create(pods, "default", pod, WriteOptions("test"))
                api.registry.delete(pods, "default", "short", DeleteOptions())
                while [*api.registry.select(pods, "default")]:
                    await asyncio.sleep(0.05)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await informers.close()
    assert not started.exists()
