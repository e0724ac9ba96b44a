from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.api.qos import qos_class


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, "BestEffort"),
        ({"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}, "BestEffort"),
        ({"requests": {"cpu": "1"}}, "Burstable"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}}, "Guaranteed"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}, "Burstable"),
    ],
)
def test_quality_of_service(resources: dict[str, Any], expected: str) -> None:
    assert qos_class({"containers": [{"name": "c", "resources": resources}]}) == expected


def test_one_unlimited_container_makes_the_pod_burstable() -> None:
    limited = {"resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
    assert qos_class({"containers": [limited], "initContainers": [{}]}) == "Burstable"
