"""Quantiles and increases of Prometheus counters over a window of scrapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise


def increase(values: Sequence[float]) -> float:
    """How much a counter grew; a drop is a restart, after which the counter began at zero."""
    return sum(after - before if after >= before else after for before, after in pairwise(values))


def quantile(share: float, buckets: Mapping[float, float]) -> float | None:
    """The value below which `share` of the observations lie; None without observations.

    `buckets` maps upper bounds to cumulative counts. Linear within a bucket, and the last finite bound for what lies
    beyond it, as PromQL's histogram_quantile does (https://prometheus.io/docs/prometheus/latest/querying/functions/).
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    rank = share * total
    lower = seen = 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            if math.isinf(bound):
                return lower
            within = buckets[bound] - seen
            return lower + (bound - lower) * ((rank - seen) / within if within else 1.0)
        lower, seen = bound, buckets[bound]
    return lower
