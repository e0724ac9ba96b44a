"""Kubernetes quantities (`500m`, `4Gi`, `2`) as exact numbers."""

from __future__ import annotations

import re
from fractions import Fraction

_QUANTITY = re.compile(r"^([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)$")
_SUFFIXES: dict[str | None, Fraction] = {
    None: Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", start=1)},
}


def parse(quantity: str | int) -> Fraction:
    """The number that a quantity means; raises `ValueError` where it means none."""
    match = _QUANTITY.match(str(quantity))
    if match is None:
        raise ValueError(f"{quantity!r} is no quantity: expected a number with a suffix such as m, k, M, G, Ki, Mi, Gi")
    number = Fraction(match[1].rstrip(".") + (match[2] or ""))
    return number * _SUFFIXES[match[3]]
