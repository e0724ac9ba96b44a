"""What the card can do, measured in the same run as everything that is compared with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from card.card import Card, seconds
from card.section import Findings
from card.sizes import Sizes

if TYPE_CHECKING:
    from card.stand import Stand


@dataclass(frozen=True, slots=True)
class Ceilings:
    copy_bytes_per_s: float  # read and written, both counted
    matmul_flops: float  # of the model's dtype, random numbers


def measure(card: Card, sizes: Sizes) -> Ceilings:
    return Ceilings(_copy_bytes_per_s(card, sizes.copy_bytes), _matmul_flops(card, sizes.matrix, sizes.dtype))


def _copy_bytes_per_s(card: Card, num_bytes: int) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=card.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(card, lambda: target.copy_(source))


def _matmul_flops(card: Card, size: int, dtype: torch.dtype) -> float:
    left, right = (torch.randn(size, size, dtype=dtype, device=card.device) for _ in range(2))
    product = torch.empty_like(left)
    return 2.0 * size**3 / seconds(card, lambda: torch.mm(left, right, out=product), 10)


def told(stand: Stand) -> Findings:
    """What they were when this process began."""
    copy, matmul = stand.ceilings.copy_bytes_per_s / 1e12, stand.ceilings.matmul_flops / 1e12
    return Findings(rows=[{"part": "ceilings", "copy TB/s": copy, "matmul TFLOP/s": matmul}])
