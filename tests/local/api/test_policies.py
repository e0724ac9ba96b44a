from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.api.policies import rule_matches
from llmservice_local.kinds.catalogue import BUILT_IN

RULE = {
    "apiGroups": ["apps"],
    "apiVersions": ["*"],
    "resources": ["deployments"],
    "operations": ["CREATE", "UPDATE"],
    "scope": "*",
}


@pytest.mark.parametrize(
    ("kind", "subresource", "operation", "changes", "matches"),
    [
        ("Deployment", "", "CREATE", {}, True),
        ("Deployment", "", "DELETE", {}, False),
        ("Deployment", "", "DELETE", {"operations": ["*"]}, True),
        ("Deployment", "", "CREATE", {"apiGroups": [""]}, False),
        ("Deployment", "", "CREATE", {"apiGroups": ["*"]}, True),
        ("Deployment", "", "CREATE", {"apiVersions": ["v1beta1"]}, False),
        ("Deployment", "", "CREATE", {"resources": ["pods"]}, False),
        ("Deployment", "", "CREATE", {"resources": ["pods", "*"]}, True),
        ("Deployment", "", "CREATE", {"resources": ["deployments/status"]}, False),
        ("Deployment", "", "CREATE", {"resources": ["deployments/*"]}, True),
        ("Deployment", "status", "UPDATE", {}, False),
        ("Deployment", "status", "UPDATE", {"resources": ["*"]}, False),
        ("Deployment", "status", "UPDATE", {"resources": ["deployments/status"]}, True),
        ("Deployment", "status", "UPDATE", {"resources": ["deployments/*"]}, True),
        ("Deployment", "scale", "UPDATE", {"resources": ["deployments/status"]}, False),
        ("Deployment", "scale", "UPDATE", {"resources": ["*/scale"]}, True),
        ("Deployment", "scale", "UPDATE", {"resources": ["*/*"]}, True),
        ("Deployment", "", "CREATE", {"scope": "Cluster"}, False),
        ("Deployment", "", "CREATE", {"scope": "Namespaced"}, True),
        ("Node", "", "CREATE", {"scope": "Namespaced", "apiGroups": ["*"], "resources": ["*"]}, False),
        ("Namespace", "", "CREATE", {"scope": "Cluster", "apiGroups": ["*"], "resources": ["*"]}, True),
    ],
)
def test_rule_matches(kind: str, subresource: str, operation: str, changes: dict[str, Any], matches: bool) -> None:
    found = next(one for one in BUILT_IN if one.name == kind)
    assert rule_matches({**RULE, **changes}, found, subresource, operation) is matches
