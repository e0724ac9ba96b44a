"""What Ready says while the pods are still getting their model."""

from __future__ import annotations

from dataclasses import replace

from llmservice_operator.pods.pod_model import Fetching
from llmservice_operator.status.conditions import Verdict

_GIB = 2**30


def while_fetching(ready: Verdict, fetching: Fetching | None, uri: str) -> Verdict:
    """`ready`, told more exactly where nothing is wrong and the pods that start are downloading."""
    if fetching is None or ready.reason != "Starting":
        return ready
    pods = f"{fetching.pods} pods fetch {uri}" if fetching.pods > 1 else f"1 pod fetches {uri}"
    if fetching.percent is None or not fetching.total_bytes:
        return replace(ready, reason="FetchingModel", message=pods)
    size = f"{fetching.total_bytes / _GIB:.2f} GiB"
    return replace(ready, reason="FetchingModel", message=f"{pods}: {fetching.percent} % of {size}")
