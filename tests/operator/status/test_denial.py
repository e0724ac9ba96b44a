from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.pods.pod import Trouble
from llmservice_operator.status.denial import denial_reason, pods_denied


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1', "QuotaExceeded"),
        ('pods "x" is forbidden: failed quota: q: must specify requests.cpu', "QuotaExceeded"),
        ('admission webhook "policy.example" denied the request: no latest tag', "AdmissionDenied"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest": hostPath', "AdmissionDenied"),
        ("ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no", "AdmissionDenied"),
        ('serviceaccount "x" not found', "FailedCreate"),
    ],
)
def test_a_denial_has_a_name(said: str, reason: str) -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": said}

    assert denial_reason(said, "FailedCreate") == reason
    assert pods_denied({"status": {"conditions": [failure]}}) == Trouble(reason, said)


@pytest.mark.parametrize(
    "deployment",
    [None, {}, {"status": {}}, {"status": {"conditions": [{"type": "ReplicaFailure", "status": "False"}]}}],
)
def test_where_nothing_was_denied_there_is_no_trouble(deployment: dict[str, Any] | None) -> None:
    assert pods_denied(deployment) is None
