"""Where the demand is heading, and whether it has just jumped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile

from llmservice_operator.scaling.demand import LENGTHS_FACTOR, SAMPLE_S, Cost, Demand, Samples, mean

_STRETCHES_S = (60.0, 120.0, 300.0)
_CERTAIN, _LIKELY = 2.0, 1.0
"""Standard deviations that a trend has to exceed, and a growth in which nothing is removed: of a constant load's
differences 2 % and 16 % do."""
_AHEAD = 6.0
"""A trend is extrapolated over so many times the stretch that it is measured over at most, that of the longest stretch
over any horizon: a wrong one costs replicas for as long as they take to start."""
_ENOUGH_FOR_TREND = 30
"""Requests in a stretch: with fewer, a few long ones look like a trend."""
_ENOUGH_OF_STRETCH = 0.75
"""Of the samples that a stretch can have."""
_BURST_CERTAIN = 3.0
_BURST = 1.2
"""A burst is at least this many times the load before it."""
_ENOUGH_BEFORE = 2
"""Samples; with one alone, what was before is not known."""
_MOST_GROWTH = 2.0
"""A trend predicts at most this many times the present load."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Growth of the demand, in replicas."""

    level: float
    """Now."""
    per_s: float
    over_s: float
    """Seconds that were compared with as many before them."""

    def after(self, horizon_s: float, already: float = 0.0) -> float:
        """The prediction, from the level on, or from what is `already` there where that is more.

        Growth fades with the time that it was measured over (Gardner & McKenzie, "Forecasting trends in time series",
        Management Science 31(10), 1985), and the level at most doubles.
        """
        fades_s = 2 * self.over_s
        growth = self.per_s * fades_s * (1 - math.exp(-horizon_s / fades_s))
        return min(max(self.level, already) + growth, _MOST_GROWTH * self.level)


def trend(samples: Samples, cost: Cost, horizon_s: float, now: float, since_s: float = -math.inf) -> Trend | None:
    """The growth that predicts most at the end of the horizon; None where none is certain.

    Stretches of one to five minutes are each compared with as long a one before: short ones show a steep growth soon,
    long ones a slow one at all. A growth is shrunk by what chance adds to it (James & Stein, "Estimation with quadratic
    loss", 1961). `since_s`: the end of the last burst, which was no trend.
    """
    long_enough = [over_s for over_s in _STRETCHES_S if horizon_s <= _AHEAD * over_s] or [max(_STRETCHES_S)]
    found = [one for over_s in long_enough if (one := _growth(samples, cost, over_s, now, since_s)) is not None]
    return max(found, key=lambda one: one.after(horizon_s), default=None)


def is_growing(samples: Samples, cost: Cost, now: float, since_s: float = -math.inf) -> bool:
    """Whether the last minute's demand is likely to be a growth, so that a replica removed now would soon be missed."""
    return _growth(samples, cost, min(_STRETCHES_S), now, since_s, _LIKELY) is not None


def _growth(
    samples: Samples, cost: Cost, over_s: float, now: float, since_s: float, certain: float = _CERTAIN
) -> Trend | None:
    """That of the last `over_s` seconds over as many before; None: too few samples, it may be chance, or it has ended.

    certain: standard deviations that it has to exceed.
    """
    newer = [demand for when, demand in samples if when > now - over_s]
    older = [demand for when, demand in samples if max(since_s, now - 2 * over_s) < when <= now - over_s]
    if min(len(newer), len(older)) < _ENOUGH_OF_STRETCH * over_s / SAMPLE_S:
        return None
    after, before = mean(newer), mean(older)
    measured = cost.replicas(after) - cost.replicas(before)
    chance = math.hypot(cost.deviation(after, over_s), cost.deviation(before, over_s))
    if measured <= certain * chance or after.requests * over_s < _ENOUGH_FOR_TREND:
        return None
    most_now = _most_now(samples, cost, now)
    if most_now < cost.replicas(after):  # a long growth has ended
        return None
    per_s = (measured - chance**2 / measured) / over_s
    at_end = cost.replicas(after) + per_s * over_s / 2  # the mean is that of the stretch's middle
    return Trend(min(at_end, most_now), per_s, over_s)


def _most_now(samples: Samples, cost: Cost, now: float) -> float:
    """What the demand may be now by the last minute and chance."""
    last_s = min(_STRETCHES_S)
    last = mean([demand for when, demand in samples if when > now - last_s])
    return cost.replicas(last) + cost.deviation(last, last_s)


def is_burst(recent: Demand, samples: Samples, cost: Cost, window_s: float, now: float) -> bool:
    """Whether the last seconds' demand is above what the window before had, by far more than chance.

    Knative's panic mode compares a short window with a long one in the same way
    (https://knative.dev/docs/serving/autoscaling/kpa-specific/). The square root of a count varies equally whatever the
    count is (Anscombe, "The transformation of Poisson, binomial and negative-binomial data", Biometrika 35, 1948), so
    that few requests after hardly any are certain soon.
    """
    before = [demand for when, demand in samples if now - window_s - SAMPLE_S < when <= now - SAMPLE_S / 2]
    if len(before) < _ENOUGH_BEFORE:
        return False
    load, load_before = cost.replicas(recent), cost.replicas(mean(before))
    if load <= _BURST * load_before:
        return False
    count = recent.requests * SAMPLE_S
    expected = count * load_before / load
    return 2 * (math.sqrt(count) - math.sqrt(expected + 3 / 8)) > _BURST_CERTAIN * math.sqrt(LENGTHS_FACTOR)


def remembered(samples: Samples, recent: Demand, now: float) -> tuple[tuple[float, Demand], ...]:
    """With the newest sample, once `SAMPLE_S` have passed since the last one, and without those that are too old."""
    oldest_s = now - 2 * max(_STRETCHES_S)
    kept = [sample for sample in takewhile(lambda one: one[0] <= now, samples) if sample[0] > oldest_s]
    if not kept or now - kept[-1][0] >= 0.9 * SAMPLE_S:
        kept.append((now, recent))
    return tuple(kept)
