"""What top-k and top-p leave of a row: its heaviest tokens, found without sorting, by torch or by a kernel of ours."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

_LOG = logging.getLogger(__name__)
WEIGHT_BITS = 30  # of a float from 0 to 1; such floats are ordered as their bits are


class Heaviest(Protocol):
    def __call__(self, weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
        """`weights` of 0 to 1, float32 `[num_rows, vocab_size]`, 0 but for the heaviest; may overwrite them.

        Each stays while those before it make less than `wanted` (float64 `[num_rows]`): their mass does, or their
        number. Of equal ones the first stay.
        """


def heaviest(weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
    """Implements `Heaviest` in plain torch: the place of the cut is found bit by bit."""

    def made_by(chosen: torch.Tensor) -> torch.Tensor:
        if by_mass:
            return torch.where(chosen, weights, 0).sum(dim=-1, dtype=torch.float64)
        return chosen.sum(dim=-1).double()

    bits = weights.view(torch.int32)
    cut = torch.zeros_like(wanted, dtype=torch.int32)
    for place in reversed(range(WEIGHT_BITS)):
        higher = cut + (1 << place)
        cut = torch.where(made_by(bits >= higher[:, None]) >= wanted, higher, cut)
    heavier, equal = bits > cut[:, None], bits == cut[:, None]
    num_equal = wanted - made_by(heavier)
    if by_mass:
        num_equal = num_equal / cut.view(torch.float32).clamp_min(1e-38).double()
    earlier = equal.cumsum(dim=-1) - equal.long()
    stays = heavier | (equal & (earlier < num_equal.clamp_min(1)[:, None]))
    return weights.masked_fill(~stays, 0)


def choose_heaviest(vocab_size: int, device: torch.device) -> Heaviest:
    """Our kernel where it compiles for rows of this size and agrees with torch; else torch."""
    from llmservice_server.kernels.heaviest import heaviest as by_kernel  # brings Triton along

    problem = why_unusable(by_kernel, vocab_size, device)
    if problem is None:
        return by_kernel
    _LOG.warning("top-k and top-p are cut by torch: our kernel is unusable here: %s", problem)
    return heaviest


def why_unusable(other: Heaviest, vocab_size: int, device: torch.device) -> str | None:
    """A phrase that says what is wrong; None where it cuts as torch does."""
    try:
        return None if agree(other, vocab_size, device) else "its answers differ from torch's"
    except Exception as error:  # a compiler's, a driver's, a card's: torch serves whatever it is
        return f"{type(error).__name__}: {error}".splitlines()[0]


def agree(other: Heaviest, vocab_size: int, device: torch.device) -> bool:
    """Whether `other` cuts as torch does: rows with and without ties, cut early, late and not at all."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([[0.1], [2.0], [8.0], [3.0]])
    logits = torch.randn(4, vocab_size, generator=generator) * spread
    logits[3] = logits[3].round()
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp().to(device)
    shares = torch.tensor([0.5, 0.99, 1e-300, 0.9], dtype=torch.float64, device=device)
    wanted = ((shares * weights.sum(dim=-1, dtype=torch.float64), True), ((shares * 100).ceil(), False))
    return all(
        torch.equal(other(weights.clone(), each, by_mass), heaviest(weights, each, by_mass)) for each, by_mass in wanted
    )
