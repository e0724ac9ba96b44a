"""Reading what an explanation is made of: the service, its Deployment, pods, Events and the pods' last lines."""

from __future__ import annotations

import asyncio

from llmservice_operator.api import labels
from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.api.spec import Manifest
from llmservice_operator.children.deployment import CONTAINER
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.explain.explanation import World
from llmservice_operator.pods.pod import pod_of

_PODS_READ = 10
"""Of how many pods the last line is read."""


async def read_world(client: KubeClient, namespace: str, name: str) -> World | None:
    """Everything there is to know; None where there is no such service. Raises KubeError where that can't be read.

    Deployment, pods, Events and logs are read as far as one is allowed to: who may not see them still learns the rest.
    """
    service = await client.get_service(namespace, name)
    if service is None:
        return None
    deployment, pods, events = await asyncio.gather(
        client.get_child(CHILD_KINDS["Deployment"], namespace, name),
        client.list_pods(namespace, labels.selector(name)),
        client.list_events(namespace, f"involvedObject.kind=LLMService,involvedObject.name={name}"),
        return_exceptions=True,
    )
    found = [] if isinstance(pods, BaseException) else pods
    lines = await asyncio.gather(*(_last_line(client, namespace, pod) for pod in found[:_PODS_READ]))
    return World(
        service=service,
        deployment=None if isinstance(deployment, BaseException) else deployment,
        pods=found,
        events=[] if isinstance(events, BaseException) else events,
        last_lines={pod["metadata"]["name"]: line for pod, line in zip(found, lines, strict=False) if line},
    )


async def _last_line(client: KubeClient, namespace: str, pod: Manifest) -> str | None:
    """What the server said last; of one that ended, before it did."""
    name = pod["metadata"]["name"]
    seen = pod_of(pod)
    try:
        text = await client.read_log(namespace, name, CONTAINER, previous=seen.restarts > 0 and not seen.serves)
    except KubeError:  # it has not started, or logs are not ours to read
        return None
    lines = text.strip().splitlines()
    return lines[-1] if lines else None
