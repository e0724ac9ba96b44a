"""Whether replicas can help to meet the targets of latency: the condition SLOFeasible, and what scaling makes of it."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from llmservice_operator.api.spec import Slo
from llmservice_operator.scaling.load import Load
from llmservice_operator.sizing import Sized, SizingProblem
from llmservice_planner.sizing.latency import LatencyModel

_ENOUGH_REQUESTS = 3


@dataclass(frozen=True, slots=True)
class Feasibility:
    """The targets can be met (True), or no number of replicas meets them (False)."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    """A word, as conditions have it."""
    message: str

    @property
    def replicas_help(self) -> bool:
        return self.status != "False"


def feasibility_of(
    slo: Slo, sizing: Sized | SizingProblem, load: Load | None, before: Feasibility | None
) -> Feasibility:
    """Of a service under this load; `before` is what was last found under the same spec."""
    sized = sizing if isinstance(sizing, Sized) else None
    return judge(
        load,
        slo.ttft_p99_s,
        itl_feasible=sized.plan.itl_feasible if sized and sized.plan else None,
        before=before,
        latency=sized.latency if sized else None,
        itl_target_s=slo.itl_p99_s,
    )


def judge(
    load: Load | None,
    ttft_target_s: float | None,
    *,
    itl_feasible: bool | None,
    before: Feasibility | None,
    latency: LatencyModel | None = None,
    itl_target_s: float | None = None,
) -> Feasibility:
    """Whether the target can be met: if one unloaded request already misses it, no replica helps.

    It is judged by requests that had a replica to themselves; between those the last answer is kept. Where the target
    is missed, it is judged by the time that the latency model gives the longest prompts as well. `itl_feasible` is the
    planner's answer on the inter-token latency: None without a target, or where the GPU's rates are unknown.
    """
    if itl_feasible is False:
        return _itl_unreachable(latency, itl_target_s)
    if ttft_target_s is None:
        return Feasibility("True", "NoTTFTTarget", "slo.ttftP99 is not set")
    known = before if before is not None and before.status != "Unknown" else None
    if load is None or load.ttft_p50_s is None or load.ttft_p99_s is None:
        return known or Feasibility("Unknown", "NoTraffic", "no request was measured lately")
    if (too_long := _too_long(load, load.ttft_p99_s, ttft_target_s, latency)) is not None:
        return too_long
    return (
        _unloaded(load, load.ttft_p50_s, load.ttft_p99_s, ttft_target_s)
        or known
        or Feasibility("Unknown", "NotMeasuredUnloaded", "no unloaded request was measured yet")
    )


def _unloaded(load: Load, ttft_p50_s: float, ttft_p99_s: float, ttft_target_s: float) -> Feasibility | None:
    """By requests that had a replica to themselves, or that met the target among others; None without such."""
    unloaded = load.peak_in_flight <= 1 and load.ttft_count >= _ENOUGH_REQUESTS
    if unloaded and ttft_p50_s > ttft_target_s:
        return Feasibility(
            "False",
            "UnloadedRequestMissesTarget",
            f"half of the requests that had a replica to themselves took more than {ttft_p50_s:.2f}s to the first"
            f" token, the target is {ttft_target_s:.2f}s: more replicas can't help. Raise slo.ttftP99, shorten prompts,"
            " or choose a faster GPU or a smaller model",
        )
    if ttft_p99_s <= ttft_target_s or unloaded:
        reachable = "requests reach their first token within slo.ttftP99 when unloaded"
        return Feasibility("True", "TargetReachable", reachable)
    return None


def _itl_unreachable(latency: LatencyModel | None, target_s: float | None) -> Feasibility:
    figures = ""
    if latency is not None and target_s is not None:
        figures = f" ({latency.decode_s(1, 1) * 1000:.3g} ms, the target is {target_s * 1000:.3g} ms)"
    return Feasibility(
        "False",
        "ITLUnreachable",
        f"one sequence alone already misses slo.itlP99 on this GPU{figures}: every step reads all the weights."
        " Raise it, or choose a GPU with more memory bandwidth or a smaller model",
    )


def _too_long(load: Load, ttft_p99_s: float, target_s: float, latency: LatencyModel | None) -> Feasibility | None:
    """Where the target is missed, and the prompts that 1 % exceed take longer than that on an idle replica."""
    if ttft_p99_s <= target_s or latency is None or load.prompt_p99_tokens is None:
        return None
    tokens = math.ceil(load.prompt_p99_tokens * load.to_compute)
    takes_s = latency.prefill_s(tokens)
    if takes_s <= target_s:
        return None
    longest = bisect_right(range(tokens), target_s, key=latency.prefill_s) - 1
    return Feasibility(
        "False",
        "PromptsTooLong",
        f"1 % of the prompts have at least {tokens} tokens to compute, which takes {takes_s:.2f}s on an idle replica,"
        f" the target is {target_s:.2f}s: more replicas can't help. Raise slo.ttftP99, keep prompts below"
        f" {max(1, longest)} tokens (engine.maxModelLen), or choose a faster GPU or a smaller model",
    )
