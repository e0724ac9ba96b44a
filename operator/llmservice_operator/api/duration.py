"""Durations as people write them in a manifest: `80ms`, `2s`, `5m`, `1h`."""

from __future__ import annotations

import re

PATTERN = r"^[0-9]{1,7}(\.[0-9]{1,3})?(ms|s|m|h)$"

_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"^(?P<number>[0-9]{1,7}(?:\.[0-9]{1,3})?)(?P<unit>ms|s|m|h)$")


def seconds(text: str) -> float:
    """The length of `text` in seconds; raises ValueError for what the CRD's pattern would refuse."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration: write a number and a unit, such as 80ms, 2s, 5m or 1h")
    return float(match["number"]) * _UNIT_S[match["unit"]]
