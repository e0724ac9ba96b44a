from __future__ import annotations

import pytest

from llmservice_local.api.protobuf import MAGIC, decode
from llmservice_local.errors import ApiError


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2, len(value)]) + value


def body(kind: str, raw: bytes, api_version: bytes = b"v1") -> bytes:
    return MAGIC + field(1, field(1, api_version) + field(2, kind.encode())) + field(2, raw)


METADATA = field(1, field(1, b"x") + field(3, b"team") + field(11, field(1, b"app") + field(2, b"web")))


def test_secret_is_read_with_its_bytes_as_base64() -> None:
    raw = METADATA + field(2, field(1, b"token") + field(2, b"hush")) + field(3, b"Opaque") + field(5, 1)
    assert decode(body("Secret", raw)) == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "x", "namespace": "team", "labels": {"app": "web"}},
        "data": {"token": "aHVzaA=="},
        "type": "Opaque",
        "immutable": True,
    }


def test_access_review_is_read_with_what_it_asks_for() -> None:
    attributes = field(1, b"team") + field(2, b"get") + field(3, b"apps") + field(4, b"*") + field(5, b"deployments")
    raw = field(1, b"") + field(2, field(1, attributes)) + field(3, b"")
    assert decode(body("SelfSubjectAccessReview", raw, b"authorization.k8s.io/v1"))["spec"] == {
        "resourceAttributes": {"namespace": "team", "verb": "get", "group": "apps", "resource": "deployments"}
    }


def test_options_of_a_delete_are_read_whatever_group_they_are_of() -> None:
    raw = field(1, 5) + field(2, field(1, b"an-uid")) + field(4, b"Foreground")
    assert decode(body("DeleteOptions", raw)) == {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "gracePeriodSeconds": 5,
        "preconditions": {"uid": "an-uid"},
        "propagationPolicy": "Foreground",
    }


def test_fields_that_nobody_asked_for_are_skipped() -> None:
    assert decode(body("Namespace", METADATA + field(2, b"") + field(3, b"")))["metadata"]["name"] == "x"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{}", 400),
        (MAGIC, 400),
        (body("Secret", METADATA)[:-3], 400),
        (MAGIC + b"\x0a", 400),
        (MAGIC + b"\x0b\x01", 400),
        (body("Pod", b""), 415),
    ],
)
def test_body_that_cannot_be_read_is_refused(data: bytes, code: int) -> None:
    with pytest.raises(ApiError) as refused:
        decode(data)
    assert refused.value.code == code
