"""How many replicas of which GPU keep a promise for given traffic, what limits each, and what they cost; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmservice_planner.capacity.replica import (
    UTILISATION,
    OperatingPoint,
    ReplicaCapacity,
    ReplicaLimits,
    Work,
    operating_point,
    replica_capacity,
)
from llmservice_planner.sizing.budget import Budget
from llmservice_planner.sizing.gpu import GPU
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_planner.sizing.plan import Plan, plan
from llmservice_planner.sizing.request import SizingError, SizingRequest, can_shard
from llmservice_planner.traffic.lengths import percentile

_COUNTS = (1, 2, 4, 8)
_BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384)
_WORTH_A_SETTING = 1.03
_WITHOUT_CACHE_TOKENS = 1e12
MODEL_LEN_MULTIPLE = 256
"""Of recommended lengths."""
_HEADROOM = 1.1
MOST_REPLICAS = 1000
"""Of an LLMService, as its CRD has it."""
NOT_SERVABLE = "not yet servable: the server runs on one GPU"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the service is planned for."""

    requests_per_s: float
    lengths: Sequence[tuple[float, float]]
    """Prompt and output tokens of equally likely requests."""
    prefix_hit_rate: float = 0.0
    """The share of prompt tokens in the prefix cache."""

    @property
    def work(self) -> Work:
        return Work.of(self.lengths, self.prefix_hit_rate)

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens."""
        return self.requests_per_s * sum(map(sum, self.lengths)) / len(self.lengths)

    @property
    def expected_tokens(self) -> int:
        """Of a request, on average: `expectedTokens`."""
        return max(1, round(sum(map(sum, self.lengths)) / len(self.lengths)))

    def share_longer_than(self, tokens: int) -> float:
        """Of the requests, by prompt and output together."""
        return sum(prompt + output > tokens for prompt, output in self.lengths) / len(self.lengths)

    @property
    def max_model_len(self) -> int:
        """The 99th percentile of prompt and output together, and a tenth more, rounded up: `maxModelLen`."""
        wanted = _HEADROOM * percentile(sorted(map(sum, self.lengths)), 0.99)
        return math.ceil(wanted / MODEL_LEN_MULTIPLE) * MODEL_LEN_MULTIPLE


@dataclass(frozen=True, slots=True)
class Targets:
    """The promise; None: no such target."""

    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One type of GPU for the traffic. Without `replicas`, `problem` says why it keeps no promise."""

    gpu: GPU
    gpu_count: int
    """Per replica."""
    request: SizingRequest
    sizing: Plan | None = None
    capacity: ReplicaCapacity | None = None
    replicas: int = 0
    point: OperatingPoint | None = None
    """Of each replica, at its share of the traffic."""
    price_per_gpu_hour: float | None = None
    problem: str = ""

    @property
    def gpus(self) -> int:
        return self.replicas * self.gpu_count

    @property
    def cost_per_hour(self) -> float | None:
        return None if self.price_per_gpu_hour is None or not self.replicas else self.gpus * self.price_per_gpu_hour

    def cost_per_million_tokens(self, traffic: Traffic) -> float | None:
        """Of prompt and output tokens together."""
        return None if self.cost_per_hour is None else self.cost_per_hour / (traffic.tokens_per_s * 3600) * 1e6

    @property
    def servable(self) -> bool:
        return self.replicas > 0 and not self.problem

    def to_dict(self, traffic: Traffic) -> dict[str, Any]:
        """The row of `llmservice plan --rate … -o json`."""
        found = {
            "gpu": self.gpu.name,
            "gpus_per_replica": self.gpu_count,
            "replicas": self.replicas,
            "gpus": self.gpus,
            "servable": self.servable,
            "problem": self.problem or None,
            "cost_per_hour": self.cost_per_hour,
            "cost_per_million_tokens": self.cost_per_million_tokens(traffic),
        }
        if self.sizing is None or self.capacity is None or self.point is None:
            return found
        return found | {
            "limited_by": self.capacity.limited_by,
            "max_requests_per_s_per_replica": self.capacity.requests_per_s,
            "utilisation": traffic.requests_per_s / (self.replicas * self.capacity.requests_per_s),
            "ttft_p99_s": self.point.ttft_p99_s,
            "itl_p99_s": self.point.itl_p99_s,
            "sequences": self.point.num_seqs,
            "max_num_seqs": self.sizing.max_num_seqs,
            "max_num_batched_tokens": self.sizing.max_num_batched_tokens,
            "max_model_len": self.sizing.max_model_len,
            "kv_cache_blocks": self.sizing.num_blocks,
        }


def candidates(
    base: SizingRequest,
    gpus: Sequence[GPU],
    traffic: Traffic,
    targets: Targets,
    prices: Mapping[str, float] | None = None,
    latency: LatencyModel | None = None,
) -> list[Candidate]:
    """For each GPU the fewest per replica that keep the targets, and the replicas; the cheapest first.

    `base` has the model and the engine's settings; its device is replaced, and `max_num_batched_tokens` chosen where it
    is None. `prices`: of a GPU and hour, by its name. `latency`: measured with one GPU per replica, in place of the
    GPU's defaults; no more GPUs are then tried.
    """
    work = traffic.work
    given = prices or {}
    found = [_candidate(base, gpu, traffic.requests_per_s, work, targets, given.get(gpu.name), latency) for gpu in gpus]
    return sorted(
        found,
        key=lambda each: (
            not each.replicas,
            each.gpu_count > 1,
            math.inf if each.cost_per_hour is None else each.cost_per_hour,
            each.gpus,
            each.gpu.memory_bytes,
        ),
    )


def replica_limits(sizing: Plan, budget: Budget, work: Work) -> ReplicaLimits:
    """Of a sized replica, whose pool holds more of a context where layers have a window."""
    kv_tokens = _WITHOUT_CACHE_TOKENS
    if sizing.kv_bytes_per_token:
        kv_tokens = budget.groups.tokens(sizing.num_blocks - 1, max(1, round(work.context_tokens)))
    num_seqs, tokens = max(1, sizing.max_num_seqs), sizing.max_num_batched_tokens
    return ReplicaLimits(num_seqs, kv_tokens, tokens, sizing.prefill_chunk_tokens)


def sized_capacity(
    request: SizingRequest, work: Work, targets: Targets, measured: LatencyModel | None = None
) -> tuple[Plan, ReplicaCapacity, LatencyModel, ReplicaLimits] | None:
    """A replica's sizing and capacity; None if it does not fit, or its device's rates are unknown."""
    sizing, budget = plan(request), Budget.of(request)
    latency = measured or budget.latency
    if not sizing.fits or latency is None:
        return None
    limits = replica_limits(sizing, budget, work)
    found = replica_capacity(latency, limits, work, targets.ttft_p99_s, targets.itl_p99_s)
    return sizing, found, latency, limits


def _candidate(
    base: SizingRequest,
    gpu: GPU,
    requests_per_s: float,
    work: Work,
    targets: Targets,
    price: float | None,
    measured: LatencyModel | None,
) -> Candidate:
    unfit = missed = many = ""  # why the fewest GPUs do not do
    request = base
    for count in _COUNTS if measured is None else (1,):
        if not can_shard(base.shape, count):
            continue
        request = replace(base, device=gpu, device_count=count, dtype=_dtype(base, gpu))
        best = _best_budget(request, work, targets, measured)
        if best is None:
            unfit = unfit or f"does not fit on {count} GPU{'s' * (count > 1)}"
            continue
        request, sizing, capacity, latency, limits = best
        on = f" on {count} GPUs" if count > 1 else ""
        if not capacity.requests_per_s:
            missed = missed or f"{_why_missed(capacity, targets)}{on}"
            continue
        needed = requests_per_s / (UTILISATION * capacity.requests_per_s)
        if needed > MOST_REPLICAS:
            many = many or f"{needed:.4g} replicas are needed{on}, and a service has at most {MOST_REPLICAS}"
            continue
        replicas = max(1, math.ceil(needed - 1e-9))
        point = operating_point(latency, limits, work, requests_per_s / replicas)
        while point is not None and math.isinf(point.ttft_p99_s) and replicas < MOST_REPLICAS:
            replicas += 1  # with room for few requests, waits have no bound well below the full rate
            point = operating_point(latency, limits, work, requests_per_s / replicas)
        return Candidate(
            gpu=gpu,
            gpu_count=count,
            request=request,
            sizing=sizing,
            capacity=capacity,
            replicas=replicas,
            point=point,
            price_per_gpu_hour=price,
            problem=NOT_SERVABLE if count > 1 else "",
        )
    problem = (many or missed or unfit) + (", nor do more GPUs help" if measured is None else "")
    return Candidate(gpu=gpu, gpu_count=1, request=request, price_per_gpu_hour=price, problem=problem)


def _best_budget(
    request: SizingRequest, work: Work, targets: Targets, measured: LatencyModel | None
) -> tuple[SizingRequest, Plan, ReplicaCapacity, LatencyModel, ReplicaLimits] | None:
    """With the token budget of a step at which the rate is largest; the default where none is worth a setting."""
    best = None
    for each in _with_budgets(request, targets):
        try:
            found = sized_capacity(each, work, targets, measured)
        except SizingError:  # the user's max_num_seqs is above this budget
            continue
        if found is None:
            continue
        if best is None or found[1].requests_per_s > _WORTH_A_SETTING * best[2].requests_per_s:
            best = (each, *found)
    return best


def _with_budgets(request: SizingRequest, targets: Targets) -> Iterator[SizingRequest]:
    yield request
    if request.max_num_batched_tokens is None and (targets.ttft_p99_s or targets.itl_p99_s):
        for tokens in _BUDGETS:
            yield replace(request, max_num_batched_tokens=tokens)


def _dtype(base: SizingRequest, gpu: GPU) -> str:
    return "float16" if base.resolved_dtype == "bfloat16" and not gpu.supports_bf16 else base.dtype


def _why_missed(capacity: ReplicaCapacity, targets: Targets) -> str:
    if capacity.limited_by == "ttftTarget":
        return f"a prompt without load takes {capacity.ttft_s:.2f} s at p99, past the TTFT target"
    if capacity.limited_by == "itlTarget":
        return f"a step takes {capacity.itl_s * 1e3:.0f} ms for one sequence, past the ITL target"
    return "the KV cache holds not one request of the average context"
