from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.api.registry import Registry, WriteOptions
from llmservice_local.errors import ApiError
from llmservice_local.kinds.policy_rules import check_disruption_budget, check_network_policy, default_network_policy

RULE = {"apiGroups": [""], "apiVersions": ["*"], "resources": ["configmaps"], "operations": ["*"]}


@pytest.mark.parametrize(
    ("spec", "types"),
    [({}, ["Ingress"]), ({"egress": [{}]}, ["Ingress", "Egress"]), ({"policyTypes": ["Egress"]}, ["Egress"])],
)
def test_policy_types_follow_the_rules_where_they_are_not_given(spec: dict[str, Any], types: list[str]) -> None:
    assert default_network_policy({"spec": spec})["spec"]["policyTypes"] == types


def test_a_port_without_a_protocol_is_tcp() -> None:
    spec = {"ingress": [{"ports": [{"port": 80}, {"port": 53, "protocol": "UDP"}]}]}
    (rule,) = default_network_policy({"spec": spec})["spec"]["ingress"]
    assert rule["ports"] == [{"port": 80, "protocol": "TCP"}, {"port": 53, "protocol": "UDP"}]


@pytest.mark.parametrize(
    ("peer", "complaint"),
    [
        ({"podSelector": {}}, None),
        ({"ipBlock": {"cidr": "10.0.0.0/8"}}, None),
        ({}, "spec.ingress[0].from[0]: Required value: must specify a peer"),
        ({"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}, "may not specify both ipBlock and another peer"),
    ],
)
def test_a_peer_is_a_block_of_addresses_or_selectors(peer: dict[str, Any], complaint: str | None) -> None:
    errors = [str(error) for error in check_network_policy({"spec": {"ingress": [{"from": [peer]}]}}, None)]
    assert not errors if complaint is None else complaint in errors[0]


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow"}, None),
        ({"minAvailable": "50%"}, None),
        ({"maxUnavailable": 1, "minAvailable": 1}, "cannot be both set"),
        ({"maxUnavailable": -1}, "must be greater than or equal to 0"),
        ({"maxUnavailable": "1"}, "a valid percent string"),
        ({"unhealthyPodEvictionPolicy": "Never"}, "Unsupported value"),
    ],
)
def test_a_budget_has_one_bound_and_a_known_policy(spec: dict[str, Any], complaint: str | None) -> None:
    errors = [str(error) for error in check_disruption_budget({"spec": spec}, None)]
    assert not errors if complaint is None else complaint in errors[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "short"}, 'webhooks[0].name: Invalid value: "short": should be a domain with at least three'),
        ({"sideEffects": "Some"}, 'webhooks[0].sideEffects: Unsupported value: "Some": supported values: "None", "No'),
        ({"timeoutSeconds": 31}, "webhooks[0].timeoutSeconds: Invalid value: 31: the timeout value must be between 1"),
        ({"failurePolicy": "fail"}, 'webhooks[0].failurePolicy: Unsupported value: "fail"'),
        ({"admissionReviewVersions": []}, "webhooks[0].admissionReviewVersions: Required value"),
        ({"clientConfig": {}}, "webhooks[0].clientConfig: Required value: exactly one of url or service"),
        ({"clientConfig": {"url": "http://x/"}}, "webhooks[0].clientConfig.url: Invalid value"),
        (
            {"rules": [{**RULE, "operations": ["APPLY"]}]},
            'webhooks[0].rules[0].operations[0]: Unsupported value: "APPLY"',
        ),
        ({"rules": [{"operations": ["*"]}]}, "webhooks[0].rules[0].apiGroups: Required value"),
        ({"rules": "all"}, "webhooks[0].rules: Invalid value"),
        ({"matchConditions": [{"name": "a", "expression": "true"}]}, "does not evaluate matchConditions"),
    ],
)
def test_invalid_webhook_configuration_is_refused(fields: dict[str, Any], message: str) -> None:
    registry = Registry()
    kind = registry.kinds.find("admissionregistration.k8s.io", "v1", "validatingwebhookconfigurations")
    hook = {
        "name": "check.llmservice.io",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "clientConfig": {"url": "https://x/"},
        "rules": [RULE],
        **fields,
    }
    with pytest.raises(ApiError) as refused:
        registry.create(kind, "", {"metadata": {"name": "check"}, "webhooks": [hook]}, WriteOptions())
    assert refused.value.code == 422
    assert message in str(refused.value)
