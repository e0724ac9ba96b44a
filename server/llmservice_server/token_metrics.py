"""What is counted at every token: kept in plain numbers, because the library's locks and labels cost more than a token.

For one thread only, that of the event loop, which also renders.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class TokenMetrics(Collector):
    """The counter `generation_tokens` and the histogram `inter_token_latency_seconds`."""

    def __init__(self, prefix: str, constant: Mapping[str, str], buckets: Sequence[float]) -> None:
        self._prefix = prefix
        self._constant = constant
        self._bounds = [*buckets, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum_s = 0.0
        self._num_tokens = 0

    def begin(self, num_tokens: int) -> None:
        """A sequence's first tokens: nothing came before them."""
        self._num_tokens += num_tokens

    def go_on(self, num_tokens: int, since_last_s: float) -> None:
        """More of them; several at once came out of one step: each took its share."""
        self._num_tokens += num_tokens
        self._counts[bisect_left(self._bounds, since_last_s / num_tokens)] += num_tokens
        self._sum_s += since_last_s

    def collect(self) -> Iterator[Metric]:
        names, values = tuple(self._constant), tuple(self._constant.values())
        tokens = CounterMetricFamily(self._prefix + "generation_tokens", "Tokens generated", labels=names)
        tokens.add_metric(values, self._num_tokens)
        yield tokens
        name = self._prefix + "inter_token_latency_seconds"
        gaps = HistogramMetricFamily(name, "Between two tokens of a sequence", labels=names)
        up_to = accumulate(self._counts)
        bounds = [*map(str, self._bounds[:-1]), "+Inf"]
        gaps.add_metric(values, list(zip(bounds, map(float, up_to), strict=True)), self._sum_s)
        yield gaps
