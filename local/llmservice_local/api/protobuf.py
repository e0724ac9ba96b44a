"""Decodes protobuf bodies, which `kubectl create namespace|secret|configmap|…`, `kubectl auth can-i` and Helm send.

A body is the magic `k8s\\0` and a `runtime.Unknown`; field numbers are those of generated.proto in k8s.io/api/core/v1,
k8s.io/api/authorization/v1 and k8s.io/apimachinery/pkg/apis/meta/v1.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llmservice_local.errors import ApiError, bad_request
from llmservice_local.objects import Object

_Decode = Callable[[bytes], Any]
_Fields = Mapping[int, tuple[str, _Decode]]

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
MAGIC = b"k8s\x00"


def decode(body: bytes) -> Object:
    """The object of a protobuf body; raises `ApiError` 415 for kinds that have no decoder here."""
    if not body.startswith(MAGIC):
        raise bad_request("a protobuf body begins with k8s and a zero byte")
    try:
        envelope = dict(_fields(body[len(MAGIC) :]))
        api_version, kind = (_text(value) for _, value in sorted(_fields(envelope[1])))
        known = _DELETE_OPTIONS if kind == "DeleteOptions" else _KINDS.get((api_version, kind))
        if known is None:
            message = f"{kind} can't be read as protobuf here: send JSON, as kubectl apply does"
            raise ApiError(415, "UnsupportedMediaType", message)
        return {"apiVersion": api_version, "kind": kind, **_message(envelope.get(2, b""), known)}
    except (IndexError, KeyError, ValueError) as error:
        raise bad_request(f"the protobuf body can't be read: {error}") from error


def _message(data: bytes, fields: _Fields) -> Object:
    found: Object = {}
    for number, value in _fields(data):
        if number not in fields:
            continue
        name, read = fields[number]
        item = read(value)
        if isinstance(item, tuple):  # an entry of a map
            found.setdefault(name, {})[item[0]] = item[1]
        elif item not in ("", {}):
            found[name] = item
    return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) pairs: bytes for length-delimited fields, a number for varints."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire_type == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise ValueError(f"field {number} is longer than the body")
            yield number, data[at : at + length]
            at += length
        else:
            raise ValueError(f"field {number} has wire type {wire_type}, expected 0 or 2")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _text(value: Any) -> str:
    return bytes(value).decode()


def _base64(value: Any) -> str:
    return base64.b64encode(bytes(value)).decode()


def _entry(read: _Decode) -> _Decode:
    def decode_entry(data: bytes) -> tuple[str, Any]:
        entry = dict(_fields(data))
        return _text(entry.get(1, b"")), read(entry.get(2, b""))

    return decode_entry


def _metadata(data: bytes) -> Object:
    return _message(data, _METADATA)


_METADATA: _Fields = {
    1: ("name", _text),
    2: ("generateName", _text),
    3: ("namespace", _text),
    11: ("labels", _entry(_text)),
    12: ("annotations", _entry(_text)),
}
_PRECONDITIONS: _Fields = {1: ("uid", _text), 2: ("resourceVersion", _text)}
_DELETE_OPTIONS: _Fields = {
    1: ("gracePeriodSeconds", int),
    2: ("preconditions", lambda data: _message(data, _PRECONDITIONS)),
    4: ("propagationPolicy", _text),
    5: ("dryRun", _text),
}
_ATTRIBUTES: _Fields = {
    1: ("namespace", _text),
    2: ("verb", _text),
    3: ("group", _text),
    5: ("resource", _text),
    6: ("subresource", _text),
    7: ("name", _text),
}
_ACCESS: _Fields = {1: ("resourceAttributes", lambda data: _message(data, _ATTRIBUTES))}
_KINDS: dict[tuple[str, str], _Fields] = {
    ("authorization.k8s.io/v1", "SelfSubjectAccessReview"): {2: ("spec", lambda data: _message(data, _ACCESS))},
    ("v1", "Namespace"): {1: ("metadata", _metadata)},
    ("v1", "ServiceAccount"): {1: ("metadata", _metadata)},
    ("v1", "ConfigMap"): {
        1: ("metadata", _metadata),
        2: ("data", _entry(_text)),
        3: ("binaryData", _entry(_base64)),
        4: ("immutable", bool),
    },
    ("v1", "Secret"): {
        1: ("metadata", _metadata),
        2: ("data", _entry(_base64)),
        3: ("type", _text),
        4: ("stringData", _entry(_text)),
        5: ("immutable", bool),
    },
}
