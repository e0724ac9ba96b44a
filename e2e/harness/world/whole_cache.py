"""The operator's cache, as if watches had reported everything by now."""

from __future__ import annotations

from llmservice_operator.api.kinds import FOLLOWED
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache


async def fill(client: KubeClient, cache: ObjectCache) -> None:
    """List everything that the operator follows; a kind whose CRD is missing has no objects."""
    for followed in FOLLOWED:
        try:
            objects, version = await client.list_all(followed.path(None), followed.selector)
        except KubeError as error:
            if error.status != 404:
                raise
            cache.withdraw(followed.kind.name)
        else:
            cache.replace(followed.kind.name, None, objects, version)
