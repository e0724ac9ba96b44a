"""Applies the demo's LLMService, waits until it is ready, and sends a chat request."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from llmservice_bench.client import DONE, events
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_planner.command import CommandError

POLL_S = 0.5


def read_manifest(path: Path) -> dict[str, Any]:
    """The LLMService in a manifest file.

    Raises:
        CommandError: the file cannot be read or has no LLMService.
    """
    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CommandError(
            f"cannot read {path}: {error}: run it in the repository's root, or give --manifest"
        ) from error
    for document in documents:
        if isinstance(document, dict) and document.get("kind") == "LLMService":
            return document
    raise CommandError(f"{path} contains no LLMService")


async def apply(
    path: Path, manifest: dict[str, Any], kubeconfig: str, kube: KubeClient, report: Callable[[str], None]
) -> None:
    """Apply with kubectl if it is installed, else by our own server-side apply.

    Raises:
        CommandError: the apply failed.
    """
    if kubectl := shutil.which("kubectl"):
        report(f"$ kubectl apply -f {path}")
        process = await asyncio.create_subprocess_exec(
            kubectl, "apply", "-f", str(path), env=os.environ | {"KUBECONFIG": kubeconfig}
        )
        if status := await process.wait():
            raise CommandError(f"kubectl apply -f {path} ended with status {status}", status=1)
        return
    report(f"server-side apply of {path} (no kubectl on the PATH)")
    metadata = manifest["metadata"]
    where = f"/apis/{manifest['apiVersion']}/namespaces/{metadata.get('namespace', 'default')}/llmservices"
    try:
        await kube.request(
            "PATCH",
            f"{where}/{metadata['name']}",
            body=manifest,
            content_type="application/apply-patch+yaml",
            query={"fieldManager": "llmservice-demo", "force": "true"},
        )
    except KubeError as error:
        raise CommandError(f"{path} was refused: {error}", status=1) from error


async def wait_ready(
    kube: KubeClient, namespace: str, name: str, timeout_s: float, report: Callable[[str], None]
) -> dict[str, Any]:
    """Wait for the condition Ready and report every new reason; returns the LLMService.

    Raises:
        CommandError: it did not become ready in time; contains the operator's last reason.
    """
    last = "the operator has not looked at it yet"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                service = await kube.get_service(namespace, name) or {}
                conditions = service.get("status", {}).get("conditions", ())
                ready = next((condition for condition in conditions if condition["type"] == "Ready"), None)
                if ready is not None:
                    if ready["status"] == "True":
                        return service
                    message = f"{ready['reason']}: {ready['message']}"
                    if message != last:
                        report(message)
                    last = message
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise CommandError(f"{name} was not Ready after {timeout_s:g} s: {last}", status=1) from error


async def chat(
    session: aiohttp.ClientSession, gateway_url: str, model: str, question: str, write: Callable[[str], None]
) -> None:
    """Stream one response.

    Raises:
        CommandError: the request failed.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "max_tokens": 48,
        "temperature": 0.8,
        "seed": 1,
    }
    pieces = 0
    async with session.post(f"{gateway_url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise CommandError(f"the gateway answered {response.status}: {(await response.text())[:300]}", status=1)
        async for event in events(response.content):
            if event == DONE:
                break
            for choice in json.loads(event)["choices"]:
                if content := choice["delta"].get("content"):
                    pieces += 1
                    write(content)
    if not pieces:
        raise CommandError("the answer was empty", status=1)
