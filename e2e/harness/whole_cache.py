"""The operator's cache, as if watches had told it of everything by now."""

from __future__ import annotations

from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.cluster.mirror import Mirror
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.monitoring.metrics import OperatorMetrics


async def fill(client: KubeClient, cache: ObjectCache) -> None:
    """List everything that the operator follows, and tell nobody."""
    await Mirror(client, cache, _ignore, OperatorMetrics().process, silence_s=70, resync_s=300).list_all()


def _ignore(kind: str, obj: Manifest, *, news: bool) -> None:
    """No loop waits for it."""
