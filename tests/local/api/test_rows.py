from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from llmservice_local.api.rows import age, pod_status

NOW = datetime(2026, 1, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-3, "0s"), (45, "45s"), (119, "119s"), (120, "2m"), (182, "3m2s"), (601, "10m"), (3 * 3600, "3h"),
        (5 * 3600 + 60, "5h1m"), (9 * 3600, "9h"), (47 * 3600, "47h"), (49 * 3600, "2d"),
    ],
)  # fmt: skip
def test_age_as_kubectl_says_it(seconds: int, shown: str) -> None:
    moment = NOW - timedelta(seconds=seconds)
    assert age(moment.strftime("%Y-%m-%dT%H:%M:%SZ"), NOW) == shown


def test_age_of_what_has_none() -> None:
    assert age(None, NOW) == "<unknown>"


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}, "Running"),
        (
            {"phase": "Running", "containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]},
            "CrashLoopBackOff",
        ),
        ({"phase": "Pending", "initContainerStatuses": [{"state": {"running": {}}}, {"state": {}}]}, "Init:0/2"),
        (
            {
                "phase": "Pending",
                "initContainerStatuses": [{"state": {"terminated": {"exitCode": 1, "reason": "Error"}}}],
            },
            "Init:Error",
        ),
        (
            {"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": {"reason": "Completed"}}}]},
            "Completed",
        ),
    ],
)
def test_status_column_of_a_pod(status: dict[str, Any], shown: str) -> None:
    assert pod_status({"metadata": {}, "status": status}) == shown
    assert pod_status({"metadata": {"deletionTimestamp": "t"}, "status": status}) == "Terminating"
