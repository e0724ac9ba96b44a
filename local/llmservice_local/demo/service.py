"""The demo's LLMService: applied as a user would, awaited, and asked something."""

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
        CommandError: there is no such file, or no LLMService in it.
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
    raise CommandError(f"{path} holds no LLMService")


async def apply(
    path: Path, manifest: dict[str, Any], kubeconfig: str, kube: KubeClient, tell: Callable[[str], None]
) -> None:
    """Apply by kubectl where there is one, else by a server-side apply of our own.

    Raises:
        CommandError: it was refused, and why.
    """
    if kubectl := shutil.which("kubectl"):
        tell(f"$ kubectl apply -f {path}")
        process = await asyncio.create_subprocess_exec(
            kubectl, "apply", "-f", str(path), env=os.environ | {"KUBECONFIG": kubeconfig}
        )
        if status := await process.wait():
            raise CommandError(f"kubectl apply -f {path} ended with status {status}", status=1)
        return
    tell(f"server-side apply of {path} (no kubectl on the PATH)")
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
    kube: KubeClient, namespace: str, name: str, timeout_s: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Wait for the condition Ready and tell of each new reason on the way; returns the LLMService.

    Raises:
        CommandError: it did not become ready in time; with the operator's last reason.
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
                        tell(message)
                    last = message
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise CommandError(f"{name} was not Ready after {timeout_s:g} s: {last}", status=1) from error


async def chat(
    session: aiohttp.ClientSession, gateway_url: str, model: str, question: str, write: Callable[[str], None]
) -> None:
    """Stream one answer, piece by piece as it comes.

    Raises:
        CommandError: there was none.
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
