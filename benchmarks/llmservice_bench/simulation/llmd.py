"""llm-d's workload variant autoscaler with its queueing model: the rate at which one replica keeps its latency targets.

https://github.com/llm-d/llm-d-workload-variant-autoscaler/blob/main/docs/developer-guide/slo-queuemodel.md. The numbers
that its Kalman filter learns of the hardware are those of the latency model here, so that it has learned them from the
beginning. Its number goes through an HPA, as llm-d deploys it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from llmservice_bench.simulation.hpa import SYNC_S, Behavior, of_total
from llmservice_bench.simulation.observation import Bounds, Observation, Totals
from llmservice_operator.scaling.decision import Decision
from llmservice_planner.sizing.latency import LatencyModel

SLO_MULTIPLIER = 3.0
"""Without targets, an iteration may take this many times an empty one: a utilisation of two thirds."""
OPTIMIZE_S = 60.0
"""Interval of the optimiser (GLOBAL_OPT_INTERVAL)."""
WINDOW_S = 60.0
"""Of the rates that it reads from Prometheus."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Seconds: of an empty iteration, of a token's arithmetic, and of reading a token's keys and values."""

    alpha_s: float
    beta_s: float
    gamma_s: float

    @classmethod
    def of(cls, latency: LatencyModel) -> Hardware:
        alpha_s = latency.step_s + latency.weights_s
        return cls(alpha_s, latency.token_s, latency.kv_token_s)


def max_rate(
    hardware: Hardware,
    input_tokens: float,
    output_tokens: float,
    ttft_s: float | None,
    itl_s: float | None,
    max_num_seqs: int,
) -> float:
    """Requests per second at which one replica keeps both targets, 0 where an empty one misses them.

    With T the time of an iteration, TTFT = T + (beta + gamma) i and ITL = T + beta + gamma (i + (o + 1) / 2), for i
    input and o output tokens. In steady state T = alpha / (1 - rho), and rho = rate (beta (i + o) + gamma (o + 1)(i +
    o / 2)). By Little's law there are rate (o + 1) T requests at once, at most `max_num_seqs`.
    """
    alpha_s, beta_s, gamma_s = hardware.alpha_s, hardware.beta_s, hardware.gamma_s
    decode_s = beta_s + gamma_s * (input_tokens + (output_tokens + 1) / 2)
    longest_s = [
        *([] if ttft_s is None else [ttft_s - (beta_s + gamma_s) * input_tokens]),
        *([] if itl_s is None else [itl_s - decode_s]),
    ]
    iteration_s = min(longest_s, default=SLO_MULTIPLIER * alpha_s)
    if iteration_s <= alpha_s:
        return 0.0
    work_s = beta_s * (input_tokens + output_tokens) + gamma_s * (output_tokens + 1) * (
        input_tokens + output_tokens / 2
    )
    rate = (1 - alpha_s / iteration_s) / work_s
    full = max_num_seqs / (output_tokens + 1)  # per iteration: rate x T, and T = alpha / (1 - rate x work)
    return min(rate, full / (alpha_s + full * work_s))


class WorkloadVariantAutoscaler:
    """ceil(arrivals / the rate that one replica serves within its targets)."""

    name = "llmd"
    interval_s = SYNC_S
    jitter = 0.0
    wakes = False

    def __init__(
        self, bounds: Bounds, hardware: Hardware, ttft_s: float | None, itl_s: float | None, max_num_seqs: int
    ) -> None:
        self._bounds = bounds
        self._hardware = hardware
        self._targets = ttft_s, itl_s
        self._max_num_seqs = max_num_seqs
        self._behavior = Behavior()
        self._history: deque[Totals] = deque([Totals()])
        self._optimized_s = -math.inf
        self._wanted: tuple[int, str] | None = None

    def decide(self, seen: Observation) -> Decision:
        now = seen.now_s
        self._history.append(seen.totals)
        while len(self._history) > 2 and self._history[1].time_s <= now - WINDOW_S:
            self._history.popleft()
        if now - self._optimized_s >= OPTIMIZE_S:
            self._optimized_s = now
            self._wanted = self._optimize(self._history[0], seen.totals)
        if self._wanted is None:
            return Decision(seen.replicas, seen.replicas, ("llmd: no arrivals or no answers yet",), active=False)
        wanted, reason = self._wanted
        wanted = of_total(wanted, 1.0, seen.replicas)
        replicas, limits = self._behavior.limit(wanted, seen.replicas, self._bounds, now)
        return Decision(replicas, self._bounds.of(wanted), (reason, *limits))

    def _optimize(self, before: Totals, now: Totals) -> tuple[int, str] | None:
        """None where the window shows nothing to compute with: the last number stays."""
        elapsed_s, finished = now.time_s - before.time_s, now.finished - before.finished
        arrived = now.arrived - before.arrived
        if elapsed_s <= 0 or not arrived or not finished:
            return self._wanted
        arrivals_per_s = arrived / elapsed_s
        prompt = (now.arrived_prompt_tokens - before.arrived_prompt_tokens) / arrived
        output = (now.finished_output_tokens - before.finished_output_tokens) / finished
        rate = max_rate(self._hardware, prompt, output, *self._targets, self._max_num_seqs)
        if rate <= 0:
            return self._wanted
        wanted = math.ceil(arrivals_per_s / rate)
        reason = f"llmd: {arrivals_per_s:.2f}/s of {prompt:.0f} in and {output:.0f} out, one replica keeps its targets"
        return wanted, f"{reason} up to {rate:.2f}/s -> {wanted}"
