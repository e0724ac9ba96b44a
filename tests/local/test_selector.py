from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.errors import ApiError
from llmservice_local.selector import field_predicate, label_predicate, matches_labels, selector_string

OBJECT = {"metadata": {"name": "x", "labels": {"app": "web", "tier": "front"}}, "spec": {"nodeName": "n", "on": True}}


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ("", True),
        ("app=web", True),
        ("app==web,tier=front", True),
        ("app=db", False),
        ("app!=db", True),
        ("missing!=x", True),
        ("app in (web, db),tier", True),
        ("app notin (web,db)", False),
        ("missing notin (a)", True),
        ("!missing", True),
        ("!app", False),
        ("missing", False),
    ],
)
def test_label_selector(selector: str, chosen: bool) -> None:
    assert label_predicate(selector)(OBJECT) is chosen


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ("metadata.name=x", True),
        ("spec.nodeName!=n", False),
        ("spec.nodeName=n,metadata.name=x", True),
        ("status.phase=", True),
        ("spec.on=true", True),
    ],
)
def test_field_selector(selector: str, chosen: bool) -> None:
    assert field_predicate(selector)(OBJECT) is chosen


@pytest.mark.parametrize("selector", ["a==b==c", "in (a", "a in b"])
def test_selector_that_cannot_be_read_is_a_bad_request(selector: str) -> None:
    with pytest.raises(ApiError) as refused:
        label_predicate(selector)
    assert refused.value.code == 400


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ({"matchLabels": {"app": "web"}}, True),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
        ({"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "tier", "operator": "Exists"}]}, True),
    ],
)
def test_selector_of_a_spec_and_its_string_form_agree(selector: dict[str, Any], chosen: bool) -> None:
    assert matches_labels(selector, OBJECT["metadata"]["labels"]) is chosen
    assert label_predicate(selector_string(selector))(OBJECT) is chosen
