from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.api.errors import ApiError
from llmservice_local.api.quota import exceeded
from llmservice_local.api.registry import Registry, WriteOptions


def pod(phase: str = "Running", **requests: str) -> dict[str, Any]:
    named = {resource.replace("_", "."): amount for resource, amount in requests.items()}
    container = {"name": "c", "image": "i", "resources": {"requests": named}}
    return {"metadata": {"name": "p"}, "spec": {"containers": [container]}, "status": {"phase": phase}}


def quota(**hard: str) -> dict[str, Any]:
    named = {resource.replace("_", "."): amount for resource, amount in hard.items()}
    return {"metadata": {"name": "q"}, "spec": {"hard": named}}


@pytest.mark.parametrize(
    ("hard", "there", "says"),
    [
        pytest.param(quota(pods="2"), [pod()], None, id="room for one"),
        pytest.param(quota(pods="1"), [pod()], "requested: pods=1, used: pods=1, limited: pods=1", id="no room"),
        pytest.param(quota(pods="1"), [pod("Succeeded")], None, id="what ended does not count"),
        pytest.param(quota(requests_cpu="1"), [pod(cpu="600m")], "limited: requests.cpu=1", id="cores"),
        pytest.param(quota(requests_memory="1Gi"), [pod(cpu="600m")], None, id="nothing of that is asked for"),
    ],
)
def test_a_quota_bounds_pods_and_what_they_request(hard: dict[str, Any], there: list[Any], says: str | None) -> None:
    said = exceeded(pod(cpu="500m"), there, [hard])

    assert said is None if says is None else says in str(said)


def test_a_pod_beyond_the_quota_is_forbidden() -> None:
    registry, options = Registry(), WriteOptions()
    registry.create(registry.kinds.find("", "v1", "resourcequotas"), "default", quota(pods="0"), options)

    with pytest.raises(ApiError, match='pods "p" is forbidden: exceeded quota: q') as refused:
        registry.create(registry.kinds.find("", "v1", "pods"), "default", pod(), options)

    assert refused.value.code == 403
