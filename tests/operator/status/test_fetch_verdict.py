from __future__ import annotations

import pytest

from llmservice_operator.pods.pod_model import Fetching
from llmservice_operator.status.conditions import READY, Verdict
from llmservice_operator.status.fetch_verdict import while_fetching

STARTING = Verdict(READY, "False", "Starting", "0 of 2 replicas are ready")
GIB = 2**30


@pytest.mark.parametrize(
    ("ready", "fetching", "reason", "message"),
    [
        (STARTING, None, "Starting", STARTING.message),
        (STARTING, Fetching(1), "FetchingModel", "1 pod fetches hf://a/b"),
        (STARTING, Fetching(2, 45, 15 * GIB), "FetchingModel", "2 pods fetch hf://a/b: 45 % of 15.00 GiB"),
        (Verdict(READY, "False", "ModelFetchFailed", "no"), Fetching(1), "ModelFetchFailed", "no"),
        (Verdict(READY, "True", "Serving", "1 of 1"), Fetching(1, 5, GIB), "Serving", "1 of 1"),
    ],
)
def test_a_download_explains_a_start_and_nothing_worse(
    ready: Verdict, fetching: Fetching | None, reason: str, message: str
) -> None:
    verdict = while_fetching(ready, fetching, "hf://a/b")
    assert (verdict.status, verdict.reason, verdict.message) == (ready.status, reason, message)
