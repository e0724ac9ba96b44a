"""How much of an embedding batch is computed between two steps of those who generate: a share of what a step takes."""

from __future__ import annotations

_SHARE = 0.12
"""Of a step's time, so that the time between two tokens grows by less than a fifth."""
_LEAST_ROWS = 16
"""Tokens that are computed at once however little that is: fewer would read a layer's weights for nothing."""
_WEIGHT = 0.2  # of a new measurement


class Pace:
    """Measures what a token of one layer costs, and accumulates credit for pieces that exceed a step's share."""

    def __init__(self) -> None:
        self._step_s: float | None = None
        self._row_s: float | None = None
        self._credit_s = 0.0

    def rows(self, max_tokens: int) -> int:
        """The tokens of a piece: what a step leaves, or what fits its share where that is less."""
        if self._step_s is not None:
            affordable = 0.0 if self._row_s is None else _SHARE * self._step_s / self._row_s
            max_tokens = min(max_tokens, int(affordable))
        return max(max_tokens, _LEAST_ROWS)

    def add_step(self, step_s: float) -> None:
        """A step took so long: its share is added to the credit."""
        self._step_s = _smoothed(self._step_s, step_s)
        self._credit_s += _SHARE * self._step_s

    def allows(self, num_tokens: int) -> bool:
        """Whether a piece of so many tokens may be computed now. Where no step was measured it always may."""
        return self._step_s is None or self._credit_s >= num_tokens * (self._row_s or 0.0)

    def add_piece(self, num_tokens: int, seconds: float) -> None:
        """A piece took so long. Credit that it left is dropped, what it exceeded it by is carried over."""
        self._row_s = _smoothed(self._row_s, seconds / num_tokens)
        self._credit_s = min(0.0, self._credit_s - seconds)


def _smoothed(known: float | None, new: float) -> float:
    return new if known is None else known + _WEIGHT * (new - known)
