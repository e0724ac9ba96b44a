from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.api.kinds import Child
from llmservice_operator.children.expected import expected_children
from llmservice_operator.sizing import Sized

KEYS = "-----BEGIN PUBLIC KEY-----\nA\n-----END PUBLIC KEY-----\n"


def children_of(service: Any, sized: Sized, public_keys: str | None) -> dict[tuple[str, str], Child]:
    children = expected_children(service, sized, 1, "img:1", public_keys=public_keys)
    return {(child.kind.name, child.key[2]): child for child in children}


def test_pods_take_signed_requests_alone_where_the_gateway_signs(service_of: Any, sized: Sized) -> None:
    children = children_of(service_of(), sized, KEYS)

    assert children["ConfigMap", "tiny-keys"].wanted
    assert children["ConfigMap", "tiny-keys"].manifest["data"] == {"public-keys.pem": KEYS}
    pod = children["Deployment", "tiny"].manifest["spec"]["template"]["spec"]
    server = pod["containers"][0]
    assert server["args"][-4:] == [
        "--gateway-keys",
        "/etc/llmservice/gateway/public-keys.pem",
        "--audience",
        "team-a/tiny",
    ]
    volume = {"name": "gateway-keys", "configMap": {"name": "tiny-keys"}}
    assert pod["volumes"][-1] == volume
    mount = {"name": "gateway-keys", "mountPath": "/etc/llmservice/gateway", "readOnly": True}
    assert server["volumeMounts"][-1] == mount
    assert list(children).index(("ConfigMap", "tiny-keys")) < list(children).index(("Deployment", "tiny"))


@pytest.mark.parametrize(("access", "public_keys"), [("direct", KEYS), ("gateway", None)])
def test_pods_take_all_requests_with_direct_access_or_without_keys(
    access: str, public_keys: str | None, service_of: Any, sized: Sized
) -> None:
    plain = children_of(service_of(), sized, None)
    children = children_of(service_of(access=access), sized, public_keys)

    assert not children["ConfigMap", "tiny-keys"].wanted
    assert children["Deployment", "tiny"] == plain["Deployment", "tiny"]


def test_a_rotation_of_the_keys_replaces_no_pod(service_of: Any, sized: Sized) -> None:
    before, after = (children_of(service_of(), sized, keys) for keys in (KEYS, KEYS + KEYS))

    assert before["ConfigMap", "tiny-keys"] != after["ConfigMap", "tiny-keys"]
    assert before["Deployment", "tiny"] == after["Deployment", "tiny"]
