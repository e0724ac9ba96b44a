"""Durations (`80ms`, `5m`) and Kubernetes quantities (`500m`, `1Gi`) as numbers."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from pydantic import StringConstraints

_DURATION_PATTERN = r"^[0-9]{1,7}(\.[0-9]{1,3})?(ms|s|m|h)$"
Duration = Annotated[str, StringConstraints(pattern=_DURATION_PATTERN, max_length=16)]
"""What the CRD accepts as a duration."""
Quantity = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9]{1,15}(\.[0-9]{1,9})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$", max_length=32),
]
"""What the CRD accepts as a quantity: Kubernetes' own grammar without signs, exponents and rare suffixes."""

_DURATION = re.compile(_DURATION_PATTERN)
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)", re.ASCII)
_FACTOR: dict[str | None, Fraction] = {
    None: Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", start=1)},
}


def seconds(text: str) -> float:
    """The length of a duration in seconds; raises ValueError for what the CRD's pattern would refuse."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration: write a number and a unit, such as 80ms, 2s, 5m or 1h")
    return float(text.removesuffix(match[2])) * _UNIT_S[match[2]]


def amount(quantity: str | int) -> Fraction:
    """A Kubernetes quantity as an exact number: bytes for memory, cores for CPU; raises ValueError.

    https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
    """
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity: expected a number with a suffix, such as 500m, 4 or 32Gi")
    return Fraction(match[1].rstrip(".") + (match[2] or "")) * _FACTOR[match[3]]


def whole_bytes(quantity: str) -> int:
    """A memory quantity in bytes, rounded down."""
    return int(amount(quantity))
