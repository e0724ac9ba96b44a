"""When requests arrive: an open loop, whose pace does not depend on how fast answers come."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def arrival_times(rate: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """Seconds from the start at which requests arrive, without end.

    Gaps are Gamma(shape = burstiness, scale = 1 / (rate · burstiness)), as in `vllm bench serve`: their mean is 1/rate,
    burstiness 1 is a Poisson process, below 1 burstier, above 1 more even. An infinite rate sends everything at once.

    Raises:
        ValueError: rate or burstiness is not positive.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"rate and burstiness must be above 0, found {rate} and {burstiness}")
    now = 0.0
    while True:
        yield now
        if rate != float("inf"):
            now += float(rng.gamma(burstiness, 1.0 / (rate * burstiness)))
