"""What recorded traffic is like: lengths, arrivals and burstiness, shared prefixes, padding of static batches; pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from llmservice_planner.traffic.lengths import percentile
from llmservice_planner.traffic.output_lengths import OutputLengths
from llmservice_planner.traffic.traces import HASH_TOKENS, TraceError, TraceRequest

STATIC_BATCH = 32
_WINDOWS_S = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 21600, 86400)
_MOST_WINDOWS = 120  # unless the user chooses their length
_MOST_CHOSEN_WINDOWS = 1_000_000
_PREDICTED = 20_000  # requests by which the prediction is judged
_APART = 50  # requests: such pairs wait in a queue together


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a length in tokens."""

    mean: float
    p50: int
    p90: int
    p95: int
    p99: int
    longest: int

    @classmethod
    def of(cls, values: Iterable[int]) -> Percentiles:
        ordered = sorted(values)
        p50, p90, p95, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
        return cls(sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Windows:
    """Means per second in consecutive windows of time, without an incomplete last one."""

    window_s: float
    requests_per_s: tuple[float, ...]
    prompt_tokens_per_s: tuple[float, ...]
    output_tokens_per_s: tuple[float, ...]

    @property
    def dispersion(self) -> float:
        """Variance over mean of the requests in a window: 1 for a Poisson process, larger for burstier arrivals."""
        counts = [rate * self.window_s for rate in self.requests_per_s]
        mean = sum(counts) / len(counts)
        return sum((count - mean) ** 2 for count in counts) / len(counts) / mean if mean else 0.0

    @property
    def peak(self) -> float:
        """Requests per second of the busiest window."""
        return max(self.requests_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of recorded traffic."""

    requests: int
    duration_s: float
    requests_per_s: float
    prompt: Percentiles
    output: Percentiles
    total: Percentiles
    """Of prompt and output together."""
    windows: Windows
    gap_variation: float | None
    """Coefficient of variation of the times between arrivals: 1 for a Poisson process. None: too few requests."""
    shared_prefix_share: float | None
    """Of prompt tokens, those that a prefix cache without bound would hold; None: prefixes were not recorded."""
    cached_share: float | None
    """Of prompt tokens, those that the recording server had cached; None: not recorded."""
    static_padding_share: float
    """Of the token slots of static batches, those that hold padding."""
    static_batch: int
    predicted_order_share: float | None
    """Of pairs of requests at most 50 apart, those whose outputs the prediction by prompt length orders rightly."""
    lengths: tuple[array[int], array[int]]
    """The prompts' and the outputs', by arrival."""
    arrivals: array[float]
    """In seconds from the first."""

    @property
    def peak_to_mean(self) -> float:
        return self.windows.peak / self.requests_per_s if self.requests_per_s else 1.0

    @property
    def loads(self) -> tuple[float, ...]:
        """Each window's tokens as requests of the mean length per second: by prompts or by outputs, what is more."""
        windows = self.windows
        return tuple(
            max(prompts / self.prompt.mean, outputs / self.output.mean)
            for prompts, outputs in zip(windows.prompt_tokens_per_s, windows.output_tokens_per_s, strict=True)
        )

    def pairs(self, most: int = 50_000) -> list[tuple[float, float]]:
        """Prompt and output tokens of at most so many requests, evenly spread over the time."""
        prompts, outputs = self.lengths
        count = min(most, self.requests)
        places = [int((i + 0.5) * self.requests / count) for i in range(count)]
        return [(prompts[place], outputs[place]) for place in places]

    def longer_than(self, tokens: int) -> int:
        """Requests whose prompt and output exceed `tokens`."""
        return sum(prompt + output > tokens for prompt, output in zip(*self.lengths, strict=True))

    def to_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "duration_s": self.duration_s,
            "requests_per_s": self.requests_per_s,
            "prompt_tokens": asdict(self.prompt),
            "output_tokens": asdict(self.output),
            "total_tokens": asdict(self.total),
            "gap_variation": self.gap_variation,
            "dispersion": self.windows.dispersion,
            "peak_requests_per_s": self.windows.peak,
            "peak_to_mean": self.peak_to_mean,
            "peak_load_requests_per_s": max(self.loads),
            "shared_prefix_share": self.shared_prefix_share,
            "cached_share": self.cached_share,
            "static_padding_share": self.static_padding_share,
            "static_batch": self.static_batch,
            "predicted_order_share": self.predicted_order_share,
            "windows": asdict(self.windows),
        }


def summarise(
    requests: Iterable[TraceRequest], *, window_s: float | None = None, static_batch: int = STATIC_BATCH
) -> Statistics:
    """In one pass over the requests, of which 20 bytes each are kept. Raises `TraceError` if there is none, or a
    million windows.

    `window_s` None: the shortest common one with at most 120 windows.
    """
    arrivals, prompts, outputs = array("d"), array("L"), array("L")
    prefixes = _SharedPrefixes()
    cached_tokens = recorded_tokens = 0
    for request in requests:
        arrivals.append(request.arrival_s)
        prompts.append(request.prompt_tokens)
        outputs.append(request.output_tokens)
        prefixes.add(request)
        if request.cached_tokens is not None:
            cached_tokens += request.cached_tokens
            recorded_tokens += request.prompt_tokens
    if not arrivals:
        raise TraceError("there is no request")
    if any(later < earlier for earlier, later in pairwise(arrivals)):
        order = sorted(range(len(arrivals)), key=arrivals.__getitem__)
        arrivals = array("d", (arrivals[i] for i in order))
        prompts, outputs = (array("L", (values[i] for i in order)) for values in (prompts, outputs))
    first_s = arrivals[0]
    arrivals = array("d", (time - first_s for time in arrivals))
    duration_s = arrivals[-1]
    return Statistics(
        requests=len(arrivals),
        duration_s=duration_s,
        requests_per_s=(len(arrivals) - 1) / duration_s if duration_s else 0.0,
        prompt=Percentiles.of(prompts),
        output=Percentiles.of(outputs),
        total=Percentiles.of(prompt + output for prompt, output in zip(prompts, outputs, strict=True)),
        windows=_windows(arrivals, prompts, outputs, window_s or _window_s(duration_s)),
        gap_variation=_variation([later - earlier for earlier, later in pairwise(arrivals)]),
        shared_prefix_share=prefixes.share,
        cached_share=cached_tokens / recorded_tokens if recorded_tokens else None,
        static_padding_share=_padding(prompts, outputs, static_batch),
        static_batch=static_batch,
        predicted_order_share=_predicted_order(prompts[:_PREDICTED], outputs[:_PREDICTED]),
        lengths=(prompts, outputs),
        arrivals=arrivals,
    )


class _SharedPrefixes:
    """The hits of a prefix cache that never evicts, by the prompts' block hashes."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._hit_tokens = 0
        self._tokens = 0

    def add(self, request: TraceRequest) -> None:
        if not request.hash_ids:
            return
        hits = 0
        for block in request.hash_ids:
            if block not in self._seen:
                break
            hits += 1
        self._hit_tokens += min(hits * HASH_TOKENS, request.prompt_tokens)
        self._tokens += request.prompt_tokens
        self._seen.update(request.hash_ids)

    @property
    def share(self) -> float | None:
        return self._hit_tokens / self._tokens if self._tokens else None


def _window_s(duration_s: float) -> float:
    return next((window for window in _WINDOWS_S if duration_s / window <= _MOST_WINDOWS), _WINDOWS_S[-1])


def _windows(arrivals: array[float], prompts: array[int], outputs: array[int], window_s: float) -> Windows:
    if arrivals[-1] > _MOST_CHOSEN_WINDOWS * window_s:
        raise TraceError(
            f"the requests span {arrivals[-1]:.4g} s, more than a million windows of {window_s:g} s: check their "
            "times, or choose longer windows"
        )
    complete = int(arrivals[-1] / window_s)
    if not complete:  # shorter than one window
        window_s, complete = arrivals[-1] or window_s, 1
    sums = [[0.0] * complete for _ in range(3)]
    for arrival, prompt, output in zip(arrivals, prompts, outputs, strict=True):
        place = int(arrival / window_s)
        if place < complete:
            for values, amount in zip(sums, (1, prompt, output), strict=True):
                values[place] += amount / window_s
    return Windows(window_s, *(tuple(values) for values in sums))


def _variation(gaps: Sequence[float]) -> float | None:
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    if not mean:
        return None
    return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean


def _padding(prompts: array[int], outputs: array[int], batch: int) -> float:
    """Static batches of consecutive requests, each padded to its longest prompt and decoded to its longest output."""
    used = slots = 0
    for start in range(0, len(prompts), batch):
        some_prompts, some_outputs = prompts[start : start + batch], outputs[start : start + batch]
        used += sum(some_prompts) + sum(some_outputs)
        slots += len(some_prompts) * (max(some_prompts) + max(some_outputs))
    return 1 - used / slots


def _predicted_order(prompts: array[int], outputs: array[int]) -> float | None:
    """Each output is predicted from those before it."""
    lengths = OutputLengths(sum(outputs) / len(outputs))
    predictions = []
    for prompt, output in zip(prompts, outputs, strict=True):
        predictions.append(lengths.predict(prompt))
        lengths.observe(prompt, output)
    right = pairs = 0.0
    for later in range(len(outputs)):
        for earlier in range(max(0, later - _APART), later):
            if outputs[earlier] != outputs[later]:
                difference = predictions[earlier] - predictions[later]
                pairs += 1
                right += 0.5 if not difference else (difference > 0) == (outputs[earlier] > outputs[later])
    return right / pairs if pairs else None
