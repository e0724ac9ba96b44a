"""Whether a live object is as it should be: a comparison of data, so that nothing is written where nothing differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmservice_operator.api import labels, quantity
from llmservice_operator.api.resource import GROUP
from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.object_cache import version

APPLIED = f"{GROUP}/applied"
"""Annotation of every child: the digest of what was last applied. A field that is no longer asked for shows in it."""

_BOOKKEEPING = frozenset({"resourceVersion", "generation", "managedFields", "uid", "creationTimestamp"})


@dataclass(frozen=True, slots=True)
class Settled:
    """A child that was as it should be: what was asked for, and what the API server made of it."""

    expected: str
    """The digest: a thousand services' manifests would be a large part of the operator's memory."""
    resource_version: int
    fingerprint: str
    service: str
    """The service that it belongs to."""


def settled(expected: Manifest, live: Manifest) -> Settled:
    service = expected["metadata"]["labels"][labels.INSTANCE]
    return Settled(digest(expected), version(live["metadata"]), fingerprint(live), service)


def reason_to_apply(expected: Manifest, live: Manifest, known: Settled | None) -> str | None:
    """Why a child must be applied; None where it is as it should be.

    What this process has seen settled is compared with the state that it was in then, exactly: whatever the API server
    had defaulted or put into another form is no difference. After a restart the fields themselves are compared.
    """
    if known is not None:
        if known.expected != digest(expected):
            return "changed"
        same = version(live["metadata"]) == known.resource_version or fingerprint(live) == known.fingerprint
        return None if same else "touched"
    if (live["metadata"].get("annotations") or {}).get(APPLIED) != digest(expected):
        return "changed"
    return None if covers(expected, live) else "touched"


def stamped(expected: Manifest) -> Manifest:
    """The child with the digest of itself, as it is applied."""
    metadata = expected["metadata"]
    annotations = {**(metadata.get("annotations") or {}), APPLIED: digest(expected)}
    return {**expected, "metadata": {**metadata, "annotations": annotations}}


def digest(expected: Manifest) -> str:
    return _hash(expected)


def fingerprint(live: Manifest) -> str:
    """All that others may change and that is not status: two states with the same fingerprint need the same writes."""
    metadata = {key: value for key, value in live["metadata"].items() if key not in _BOOKKEEPING}
    return _hash({**{key: value for key, value in live.items() if key != "status"}, "metadata": metadata})


def covers(expected: Any, live: Any) -> bool:
    """Whether `live` has every field of `expected`. A field that the API server leaves out when empty may be missing.

    Lists must be of one length: what others add to a list makes one apply after a restart, which changes nothing.
    """
    if isinstance(expected, Mapping):
        if not isinstance(live, Mapping):
            return not expected and live is None
        return all(covers(value, live.get(key)) for key, value in expected.items())
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        found = live if isinstance(live, list) else []
        return len(expected) == len(found) and all(covers(*pair) for pair in zip(expected, found, strict=True))
    if live is None:
        return not expected
    return bool(expected == live) or _same_quantity(expected, live)


def _same_quantity(expected: Any, live: Any) -> bool:
    """The API server writes `1000m` as `1`."""
    try:
        return quantity.amount(str(expected)) == quantity.amount(str(live))
    except ValueError:
        return False


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
