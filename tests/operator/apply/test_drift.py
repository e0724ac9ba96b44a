from __future__ import annotations

import copy
from typing import Any

import pytest

from llmservice_operator.apply.drift import APPLIED, covers, reason_to_apply, settled, stamped

EXPECTED: dict[str, Any] = {
    "kind": "Deployment",
    "metadata": {"name": "tiny", "namespace": "team-a", "labels": {"app.kubernetes.io/instance": "tiny"}},
    "spec": {"replicas": 2, "template": {"spec": {"containers": [{"name": "server", "args": ["serve"]}]}}},
}


def live(**metadata: Any) -> dict[str, Any]:
    """What the API server makes of EXPECTED: with defaults, and with a status."""
    made = copy.deepcopy(stamped(EXPECTED))
    made["metadata"] |= {"uid": "u", "resourceVersion": "5", "generation": 1, **metadata}
    made["spec"]["strategy"] = {"type": "RollingUpdate"}
    made["status"] = {"replicas": 2}
    return made


@pytest.mark.parametrize("restarted", [True, False])
def test_what_is_as_it_should_be_is_left_alone(restarted: bool) -> None:
    known = None if restarted else settled(EXPECTED, live())

    assert reason_to_apply(EXPECTED, live(resourceVersion="9"), known) is None


@pytest.mark.parametrize("restarted", [True, False])
def test_a_change_of_status_alone_is_nobodys_drift(restarted: bool) -> None:
    after = live(resourceVersion="9") | {"status": {"replicas": 1}}
    known = None if restarted else settled(EXPECTED, live())

    assert reason_to_apply(EXPECTED, after, known) is None


@pytest.mark.parametrize("restarted", [True, False])
def test_a_foreign_edit_of_an_owned_field_is_seen(restarted: bool) -> None:
    after = live(resourceVersion="9")
    after["spec"]["replicas"] = 7
    known = None if restarted else settled(EXPECTED, live())

    assert reason_to_apply(EXPECTED, after, known) == "touched"


@pytest.mark.parametrize("restarted", [True, False])
def test_a_field_that_is_no_longer_asked_for_is_seen(restarted: bool) -> None:
    fewer = copy.deepcopy(EXPECTED)
    del fewer["spec"]["template"]["spec"]["containers"][0]["args"]
    known = None if restarted else settled(EXPECTED, live())

    assert reason_to_apply(fewer, live(), known) == "changed"


def test_a_child_of_an_operator_that_left_no_stamp_is_applied_once() -> None:
    found = live()
    del found["metadata"]["annotations"][APPLIED]

    assert reason_to_apply(EXPECTED, found, None) == "changed"


@pytest.mark.parametrize(
    ("expected", "found", "covered"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, {}, False),
        ({"a": {}, "b": [], "c": False, "d": ""}, {}, True),  # left out when empty
        ({"a": {"b": 1}}, {"a": None}, False),
        ({"cpu": "1000m"}, {"cpu": "1"}, True),
        ({"memory": "1Gi"}, {"memory": "1024Mi"}, True),
        ({"memory": "1Gi"}, {"memory": "2Gi"}, False),
        (["a", "b"], ["a", "b"], True),
        (["a", "b"], ["b", "a"], False),
        (["a"], ["a", "b"], False),
        ([{"name": "x"}], [{"name": "x", "protocol": "TCP"}], True),
        ([{"name": "x"}], None, False),
    ],
)
def test_a_live_object_covers_what_is_expected(expected: Any, found: Any, covered: bool) -> None:
    assert covers(expected, found) is covered
