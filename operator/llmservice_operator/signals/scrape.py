"""One scrape of one server's metrics, from the pod or from Prometheus: the few series that scaling and sizing use."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from llmservice_operator.monitoring.promql import (
    ADMISSIBLE,
    ARRIVED,
    ARRIVED_OUTPUT_TOKENS,
    ARRIVED_PROMPT_TOKENS,
    BATCH,
    CACHE_HITS,
    CACHE_QUERIES,
    EMBEDDED,
    FINISHED,
    GENERATED_TOKENS,
    KERNEL_FALLBACK,
    KV_BLOCKS,
    KV_USAGE,
    MEMORY,
    MODEL_INFO,
    PROMPT_BUCKET,
    PROMPT_TOKENS,
    REJECTED,
    RUNNING,
    TTFT_BUCKET,
    WAITING,
)
from llmservice_operator.scaling.demand import Demand
from llmservice_operator.scaling.load import Scrape

SERIES = (
    *(RUNNING, WAITING, KV_USAGE, ADMISSIBLE, FINISHED, REJECTED),
    *(ARRIVED, ARRIVED_PROMPT_TOKENS, ARRIVED_OUTPUT_TOKENS, CACHE_HITS, CACHE_QUERIES),
    *(PROMPT_TOKENS, GENERATED_TOKENS),
    *(EMBEDDED, TTFT_BUCKET, PROMPT_BUCKET, KV_BLOCKS, MEMORY, KERNEL_FALLBACK, MODEL_INFO),
)

_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(
    r'(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?'
    r"[ \t]+(?P<value>\S+)(?:[ \t]+-?\d+)?\s*"
)
"""The labels' values keep their escapes: none of those that are read has any."""

ANSWERED = ("stop", "length")
"""Why an answer ends that is whole."""

Sample = tuple[str, Mapping[str, str], float]
"""A series' name, its labels and its value."""


class ScrapeError(ValueError):
    """The text is not the metrics of an inference server."""


def parse_exposition(text: str, time_s: float) -> Scrape:
    """A pod's `/metrics` answer; raises ScrapeError.

    Only the lines of the series that are used are parsed, a tenth of the page, without prometheus_client's metric
    families: this runs in every pass for every pod.
    https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
    """
    return scrape_of(_samples(line for line in text.splitlines() if line.startswith(SERIES)), time_s)


def _samples(lines: Iterable[str]) -> Iterator[Sample]:
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            raise ScrapeError(f"not in Prometheus' text format: {line[:80]!r}")
        try:
            value = float(match["value"])
        except ValueError as error:
            raise ScrapeError(f"not in Prometheus' text format: {error}") from error
        yield match["name"], dict(_LABEL.findall(match["labels"] or "")), value


def scrape_of(samples: Iterable[Sample], time_s: float) -> Scrape:
    """Add up what is labelled by lane, reason or state; raises ScrapeError for samples of anything but our server.

    A lane that no request ever waited in has no series yet, which counts as zero.
    """
    totals: dict[str, float] = defaultdict(float)
    buckets: dict[str, dict[float, float]] = {TTFT_BUCKET: defaultdict(float), PROMPT_BUCKET: defaultdict(float)}
    lanes: dict[str, float] = defaultdict(float)
    answered = 0.0
    weights: float | None = None
    model_code: str | None = None
    fallbacks: list[str] = []
    for name, labels, value in samples:
        if not math.isfinite(value):
            continue
        if name in buckets:
            buckets[name][_bound(labels)] += value
        elif name == MEMORY:
            weights = value if labels.get("kind") == "weights" else weights
        elif name == KERNEL_FALLBACK:
            fallbacks += [labels.get("part", "")] if value else []
        elif name == MODEL_INFO:
            model_code = labels.get("model_code")
        elif name in SERIES:
            totals[name] += value
            answered += value if labels.get("finished_reason") in ANSWERED else 0.0
            if "lane" in labels:
                lanes[name] += value if labels["lane"] == BATCH else 0.0
    if RUNNING not in totals:
        raise ScrapeError(f"{RUNNING} is missing: expected the metrics of llmservice serve")
    first_tokens = max(buckets[TTFT_BUCKET].values(), default=0.0)
    return Scrape(
        time_s=time_s,
        running=totals[RUNNING],
        waiting=totals[WAITING],
        kv_usage=totals[KV_USAGE],
        admissible=totals[ADMISSIBLE] or None,
        finished=totals[FINISHED],
        answered=answered,
        rejected=totals[REJECTED],
        embedded=totals[EMBEDDED],
        arrived=_demand(totals) if ARRIVED in totals else None,
        batch_arrived=_demand(lanes),
        cache_hits=totals[CACHE_HITS],
        cache_queries=totals[CACHE_QUERIES],
        ttft_buckets=tuple(sorted(buckets[TTFT_BUCKET].items())),
        prompt_buckets=tuple(sorted(buckets[PROMPT_BUCKET].items())),
        kv_blocks=int(totals[KV_BLOCKS]) if KV_BLOCKS in totals else None,
        weights_bytes=weights,
        model_code=model_code,
        fallbacks=tuple(sorted(fallbacks)),
        batch_waiting=lanes[WAITING],
        batch_running=lanes.get(RUNNING, None if totals[RUNNING] else 0.0),
        served=Demand(first_tokens, totals[PROMPT_TOKENS], totals[GENERATED_TOKENS]),
    )


def _bound(labels: Mapping[str, str]) -> float:
    try:
        return float(labels["le"])
    except (KeyError, ValueError) as error:
        raise ScrapeError(f"a bucket without a bound: {error!r}") from error


def _demand(counters: Mapping[str, float]) -> Demand:
    return Demand(*(counters.get(name, 0.0) for name in (ARRIVED, ARRIVED_PROMPT_TOKENS, ARRIVED_OUTPUT_TOKENS)))
