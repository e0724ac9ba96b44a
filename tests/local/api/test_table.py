from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from llmservice_local.api.table import age, json_path, pod_status

NOW = datetime(2026, 1, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-3, "0s"), (45, "45s"), (119, "119s"), (120, "2m"), (182, "3m2s"), (601, "10m"), (3 * 3600, "3h"),
        (5 * 3600 + 60, "5h1m"), (9 * 3600, "9h"), (47 * 3600, "47h"), (49 * 3600, "2d"),
    ],
)  # fmt: skip
def test_age_has_kubectls_format(seconds: int, shown: str) -> None:
    moment = NOW - timedelta(seconds=seconds)
    assert age(moment.strftime("%Y-%m-%dT%H:%M:%SZ"), NOW) == shown


def test_age_without_a_timestamp_is_unknown() -> None:
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


OBJECT = {
    "metadata": {"labels": {"a.b/c": "x"}},
    "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other", "status": "False"}]},
}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ('.status.conditions[?(@.type=="Ready")].status', ["True"]),
        (".status.conditions[*].status", ["True", "False"]),
        (".status.conditions[-1].type", ["Other"]),
        (".status.conditions[7].type", []),
        (".status.missing.deeper", []),
        (r".metadata.labels.a\.b/c", ["x"]),
        (".metadata.labels['a.b/c']", ["x"]),
    ],
)
def test_values_at_a_path(path: str, expected: list[Any]) -> None:
    assert json_path(OBJECT, path) == expected


def test_path_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot read"):
        json_path(OBJECT, ".status[?(@.x>1)]")
