"""Whether the promise can be kept at all: if one unloaded request already misses it, no replica helps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmservice_operator.signals.load import Load

_ENOUGH_REQUESTS = 3


@dataclass(frozen=True, slots=True)
class Feasibility:
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def assess(
    load: Load | None, ttft_target_s: float | None, *, itl_feasible: bool | None, before: Feasibility | None
) -> Feasibility:
    """Judge the promise by requests that had a replica to themselves; between such moments the last verdict stands.

    `itl_feasible` is the planner's word on the inter-token latency: None without a promise or without the card's rates.
    """
    if itl_feasible is False:
        return Feasibility(
            "False",
            "ITLUnreachable",
            "one sequence alone already misses slo.itlP99 on this card (every step reads all the weights):"
            " raise it, or choose a card with more memory bandwidth or a smaller model",
        )
    if ttft_target_s is None:
        return Feasibility("True", "NoTTFTPromise", "no slo.ttftP99 is promised")
    verdict = before if before is not None and before.status != "Unknown" else None
    if load is None or load.ttft_p50_s is None or load.ttft_p99_s is None:
        return verdict or Feasibility("Unknown", "NoTraffic", "no request was measured lately")
    unloaded = load.peak_in_flight <= 1 and load.ttft_count >= _ENOUGH_REQUESTS
    if unloaded and load.ttft_p50_s > ttft_target_s:
        return Feasibility(
            "False",
            "UnloadedRequestMissesTarget",
            f"half of the requests that had a replica to themselves took more than {load.ttft_p50_s:.2f}s to the first"
            f" token, {ttft_target_s:.2f}s is promised: more replicas can't help. Raise slo.ttftP99, shorten prompts,"
            " or choose a faster card or a smaller model",
        )
    if load.ttft_p99_s <= ttft_target_s or unloaded:
        return Feasibility(
            "True", "TargetReachable", "requests reach their first token within slo.ttftP99 when unloaded"
        )
    return verdict or Feasibility("Unknown", "NotMeasuredUnloaded", "no unloaded request was measured yet")
