"""Kubernetes quantities (`500m`, `1Gi`) as numbers.

The suffixes are those of https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/.
"""

from __future__ import annotations

import re
from fractions import Fraction

PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,9})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"

_FACTOR = {"": Fraction(1), "m": Fraction(1, 1000)}
_FACTOR |= {suffix: Fraction(1000 ** (power + 1)) for power, suffix in enumerate(("k", "M", "G", "T", "P"))}
_FACTOR |= {suffix: Fraction(1024 ** (power + 1)) for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"))}
_QUANTITY = re.compile(r"^(?P<number>[0-9]{1,15}(?:\.[0-9]{1,9})?)(?P<suffix>m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")


def amount(text: str) -> Fraction:
    """The quantity as an exact number: bytes for memory, cores for CPU; raises ValueError."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity: write a number with a suffix, such as 500m, 4 or 32Gi")
    return Fraction(match["number"]) * _FACTOR[match["suffix"] or ""]


def whole_bytes(text: str) -> int:
    """A memory quantity in bytes, rounded down."""
    return int(amount(text))
