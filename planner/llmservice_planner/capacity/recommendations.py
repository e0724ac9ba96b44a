"""Fields of a manifest that follow from recorded traffic, each with its reason; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llmservice_planner.capacity.manifest import duration
from llmservice_planner.capacity.plan import MODEL_LEN_MULTIPLE, Targets, Traffic, sized_capacity
from llmservice_planner.capacity.replica import UTILISATION, ReplicaCapacity, Work
from llmservice_planner.sizing.plan import Plan
from llmservice_planner.sizing.request import SizingRequest
from llmservice_planner.traffic.summary import Statistics

_BUDGETS = (512, 1024, 2048, 4096, 8192)
_NEARLY_ALL = 0.95
_FEWEST_WINDOWS = 2


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One field of `spec`."""

    field: str
    value: int | str
    reason: str


def model_len(traffic: Traffic, statistics: Statistics, most: int | None = None) -> Recommendation:
    """`engine.maxModelLen`, at most `most`: longer requests are refused."""
    length, reason = traffic.max_model_len, f"x 1.1, rounded up to {MODEL_LEN_MULTIPLE}"
    if most is not None and most < length:
        length, reason = most, "more than the model knows"
    longer = statistics.longer_than(length)
    return Recommendation(
        "engine.maxModelLen",
        length,
        f"p99 of prompt and output is {statistics.total.p99} tokens, {reason}; "
        f"{longer} of {statistics.requests} requests ({longer / statistics.requests:.2%}) are longer and are refused",
    )


def of_traffic(statistics: Statistics, traffic: Traffic) -> list[Recommendation]:
    """What needs neither model nor GPU."""
    prompt = statistics.prompt.p90
    tokens = next((tokens for tokens in _BUDGETS if tokens >= prompt), _BUDGETS[-1])
    return [
        model_len(traffic, statistics),
        _expected(traffic, statistics),
        Recommendation(
            "engine.maxNumBatchedTokens",
            tokens,
            f"the smallest power of two, {_BUDGETS[0]} to {_BUDGETS[-1]}, that holds 90 % of the prompts ({prompt} "
            "tokens) in one step; --model and --gpu weigh it against the time between tokens",
        ),
    ]


def of_replica(
    statistics: Statistics, traffic: Traffic, request: SizingRequest, targets: Targets
) -> list[Recommendation] | None:
    """With a model on a GPU: settings, targets and replicas; None if it does not fit, its rates are unknown, or waits
    have no bound, as it holds hardly more than one request.

    `targets`: those that the user has set; the others are recommended.
    """
    found = _shortest_good_steps(request, traffic.work, targets)
    if found is None or math.isinf(found[1].ttft_s):
        return None
    sizing, capacity, share = found
    tokens = sizing.max_num_batched_tokens
    listed = [
        model_len(traffic, statistics, request.model_len),
        _expected(traffic, statistics, request.model_len),
        Recommendation(
            "engine.maxNumBatchedTokens",
            tokens,
            f"the shortest steps that keep {share:.0%} of the rate that any length reaches on {request.device.name}",
        ),
    ]
    if targets.ttft_p99_s is None:
        listed.append(
            Recommendation(
                "slo.ttftP99",
                duration(_round_up(capacity.ttft_s)),
                f"what a replica keeps at {UTILISATION:.0%} utilisation ({capacity.ttft_s:.2f} s), rounded up: waits "
                f"included, of {capacity.requests_per_s * UTILISATION:.2f} requests/s",
            )
        )
    if targets.itl_p99_s is None:
        listed.append(
            Recommendation(
                "slo.itlP99",
                duration(_round_up(capacity.itl_s)),
                f"the 99th percentile of steps ({capacity.itl_s * 1e3:.0f} ms) with {capacity.num_seqs:.0f} sequences "
                "and the prompts that arrive, rounded up",
            )
        )
    return [*listed, *_replicas(statistics, capacity)]


def replicas_for(requests_per_s: float, capacity: ReplicaCapacity) -> int:
    return max(1, math.ceil(requests_per_s / (UTILISATION * capacity.requests_per_s) - 1e-9))


def quiet_rate(statistics: Statistics) -> float:
    """Requests per second, of the mean length, that 95 % of the windows exceed."""
    rates = sorted(statistics.loads)
    return rates[int(len(rates) * 0.05)]


def _expected(traffic: Traffic, statistics: Statistics, most: int | None = None) -> Recommendation:
    return Recommendation(
        "engine.sizing.expectedTokens",
        min(traffic.expected_tokens, most or traffic.expected_tokens),
        f"the mean of prompt ({statistics.prompt.mean:.0f}) and output ({statistics.output.mean:.0f}) together",
    )


def _shortest_good_steps(
    request: SizingRequest, work: Work, targets: Targets
) -> tuple[Plan, ReplicaCapacity, float] | None:
    """The shortest steps with nearly the best rate, and the share of that: longer ones only lengthen the gaps."""
    sized = [
        found[:2]
        for tokens in _BUDGETS
        if (found := sized_capacity(replace(request, max_num_batched_tokens=tokens), work, targets)) is not None
    ]
    best = max((capacity.requests_per_s for _, capacity in sized), default=0.0)
    if not best:
        return None
    for sizing, capacity in sized:
        if capacity.requests_per_s >= _NEARLY_ALL * best:
            return sizing, capacity, capacity.requests_per_s / best
    return None


def _replicas(statistics: Statistics, capacity: ReplicaCapacity) -> list[Recommendation]:
    each = f"a replica takes {capacity.requests_per_s:.2f} requests/s within the targets, {UTILISATION:.0%} planned"
    windows = statistics.windows
    if len(windows.requests_per_s) < _FEWEST_WINDOWS:
        count = replicas_for(statistics.requests_per_s, capacity)
        return [Recommendation("replicas", count, f"{statistics.requests_per_s:.2f} requests/s on average; {each}")]
    quiet, peak = quiet_rate(statistics), max(statistics.loads)
    needed = replicas_for(peak, capacity)
    span = f"{windows.window_s:g} s"
    return [
        Recommendation(
            "autoscaling.minReplicas",
            replicas_for(quiet, capacity),
            f"95 % of the {span} have the tokens of more than {quiet:.2f} mean requests/s; {each}",
        ),
        Recommendation(
            "autoscaling.maxReplicas",
            needed + 1,
            f"the busiest {span} have the tokens of {peak:.2f} mean requests/s, for {needed}; one more may fail",
        ),
    ]


def _round_up(seconds: float) -> float:
    """To two digits."""
    step = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return float(math.ceil(seconds / step - 1e-9) * step)
