"""Throughput and latency over the number of sequences that decode at once, from the latency model."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from llmservice_planner.charts import COLOURS, GREY, PALE, entitle, figure, style, text_chart
from llmservice_planner.sizing.budget import Budget
from llmservice_planner.sizing.latency import LatencyModel, StepBatch
from llmservice_planner.sizing.request import CAP_OF_CPU, MAX_NUM_SEQS_CAP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KNEE_ELASTICITY = 0.5
"""The knee is the largest batch at which 1 % more sequences still add at least 0.5 % to the tokens per second."""
_TAIL = 0.01
_DIFFERENCE = 1.01

Bound = Literal["memory", "compute", "overhead"]
"""What takes most of a step on average: reading weights and KV cache, arithmetic, or the overheads."""


@dataclass(frozen=True, slots=True)
class TypicalRequest:
    """A typical request, and the steps that compute its prompt."""

    prompt_tokens: int
    output_tokens: int
    chunk_tokens: int
    """Prompt tokens of a step at most."""

    @classmethod
    def of(cls, typical_tokens: int, chunk_tokens: int) -> TypicalRequest:
        """Of `typical_tokens` in all, a sixth of them the answer (1,100 and 210 in the Azure conversation trace)."""
        output_tokens = max(1, typical_tokens // 6)
        return cls(max(1, typical_tokens - output_tokens), output_tokens, chunk_tokens)

    @property
    def context_tokens(self) -> float:
        """Of a request that decodes, on average."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def chunks(self) -> int:
        """Steps that compute its prompt."""
        return math.ceil(self.prompt_tokens / self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    num_seqs: int
    tokens_per_s: float
    """Output tokens, with the steps that compute the prompts of these requests."""
    itl_p50_s: float
    """Of a step without prompt tokens, or with them where most steps have some."""
    itl_p99_s: float
    """Of a step with a chunk of a prompt, where more than 1 % of the steps have one."""
    ttft_s: float
    """Of a prompt that finds `num_seqs` decoding and no other prompt waiting: the step under way and its own steps."""
    bound: Bound

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_seqs": self.num_seqs,
            "tokens_per_second": self.tokens_per_s,
            "itl_p50_seconds": self.itl_p50_s,
            "itl_p99_seconds": self.itl_p99_s,
            "ttft_seconds": self.ttft_s,
            "bound": self.bound,
        }


@dataclass(frozen=True, slots=True)
class Curve:
    """From one sequence to the most that fit."""

    title: str
    typical: TypicalRequest
    points: tuple[CurvePoint, ...]
    """Of every batch size."""
    knee: int
    within_slo: int | None
    """The largest batch within the targets, 0: none is; None: no target is given."""
    limited_by: str
    """Why the curve ends."""
    itl_p99_s: float | None
    ttft_p99_s: float | None

    def at(self, num_seqs: int) -> CurvePoint:
        return self.points[num_seqs - 1]

    @property
    def shown(self) -> list[CurvePoint]:
        """Powers of two, the last one, and what is marked."""
        last = len(self.points)
        sizes = {1 << power for power in range(last.bit_length())} | {last, self.knee, self.within_slo or 1}
        sizes |= {start for start, _, _ in self.regions}
        return [self.at(size) for size in sorted(sizes)]

    @property
    def regions(self) -> list[tuple[int, int, Bound]]:
        """Ranges of batch sizes with the same bound."""
        groups = [list(group) for _, group in groupby(self.points, key=lambda point: point.bound)]
        return [(group[0].num_seqs, group[-1].num_seqs, group[0].bound) for group in groups]

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.typical.prompt_tokens,
            "output_tokens": self.typical.output_tokens,
            "knee": self.knee,
            "within_slo": self.within_slo,
            "limited_by": self.limited_by,
            "points": [point.to_dict() for point in self.shown],
        }


def curve(
    model: LatencyModel,
    typical: TypicalRequest,
    most: int,
    limited_by: str,
    *,
    title: str = "",
    itl_p99_s: float | None = None,
    ttft_p99_s: float | None = None,
) -> Curve:
    """The curve up to `most` sequences, which `limited_by` explains."""
    points = tuple(_point(model, typical, size) for size in range(1, most + 1))
    within = None
    if itl_p99_s is not None or ttft_p99_s is not None:

        def worst(point: CurvePoint) -> float:
            return max(point.itl_p99_s / (itl_p99_s or math.inf), point.ttft_s / (ttft_p99_s or math.inf))

        within = bisect_right(points, 1.0, key=worst)
    knee = max((size for size in range(1, most + 1) if _elasticity(model, typical, size) >= KNEE_ELASTICITY), default=1)
    return Curve(title, typical, points, knee, within, limited_by, itl_p99_s, ttft_p99_s)


def most_sequences(budget: Budget, typical: TypicalRequest) -> tuple[int, str]:
    """The largest batch of typical requests, and what bounds it."""
    length = math.ceil(typical.context_tokens)
    most, why = MAX_NUM_SEQS_CAP, f"a server takes {MAX_NUM_SEQS_CAP} sequences at most"
    if budget.request.on_cpu:
        most, why = CAP_OF_CPU, f"a server on a CPU takes {CAP_OF_CPU} sequences if --max-num-seqs says nothing else"
    if budget.request.max_num_seqs is not None:
        most, why = budget.request.max_num_seqs, "max_num_seqs as set"
    if budget.step.total < most:
        most, why = budget.step.total, f"a step has {budget.step.total} tokens at most, one for each sequence"
    held = bisect_right(range(1, most + 1), 0, key=lambda size: size - budget.sequences(length, size))
    if held < most:
        most, why = held, f"the KV cache holds {held} sequences of {length} tokens"
    return max(1, most), why


def _point(model: LatencyModel, typical: TypicalRequest, num_seqs: int) -> CurvePoint:
    decode_s, chunk_s = _decode_s(model, typical, num_seqs), _step_with_prompts_s(model, typical, num_seqs)
    chunked = _steps_with_prompts(typical, num_seqs)
    context_tokens = num_seqs * typical.context_tokens
    prefill_s = model.prefill_s(typical.prompt_tokens, typical.chunk_tokens, num_seqs, context_tokens)
    return CurvePoint(
        num_seqs=num_seqs,
        tokens_per_s=_tokens_per_s(model, typical, num_seqs),
        itl_p50_s=chunk_s if chunked >= 1 / 2 else decode_s,
        itl_p99_s=chunk_s if chunked > _TAIL else decode_s,
        ttft_s=(chunk_s if chunked > _TAIL else decode_s) + prefill_s,
        bound=_bound(model, _mean_batch(typical, num_seqs)),
    )


def _decode_s(model: LatencyModel, typical: TypicalRequest, num_seqs: float) -> float:
    return model.seconds(StepBatch(num_seqs, num_seqs * typical.context_tokens))


def _steps_with_prompts(typical: TypicalRequest, num_seqs: float) -> float:
    """The chunks of prompts per step; a request's prompt comes once in `output_tokens` steps of each sequence."""
    return num_seqs * typical.chunks / typical.output_tokens


def _step_with_prompts_s(model: LatencyModel, typical: TypicalRequest, num_seqs: float) -> float:
    """A step with a chunk, or with as many prompt tokens as arrive per step if that is more."""
    chunk = min(typical.chunk_tokens, typical.prompt_tokens)
    tokens = max(chunk, num_seqs * typical.prompt_tokens / typical.output_tokens)
    pairs = tokens * (typical.prompt_tokens + 1) / 2
    return model.seconds(StepBatch(num_seqs, num_seqs * typical.context_tokens, tokens, tokens / chunk, pairs))


def _mean_batch(typical: TypicalRequest, num_seqs: float) -> StepBatch:
    """A step on average: with the prompt tokens that arrive per step."""
    share = num_seqs / typical.output_tokens
    tokens = share * typical.prompt_tokens
    pairs = tokens * (typical.prompt_tokens + 1) / 2
    return StepBatch(num_seqs, num_seqs * typical.context_tokens, tokens, share, pairs)


def _tokens_per_s(model: LatencyModel, typical: TypicalRequest, num_seqs: float) -> float:
    """In the time of `output_tokens` steps, each sequence's prompt is computed once, in steps that take longer."""
    if _steps_with_prompts(typical, num_seqs) >= 1:
        return num_seqs / model.seconds(_mean_batch(typical, num_seqs))
    chunks, prompt, context = typical.chunks, typical.prompt_tokens, num_seqs * typical.context_tokens
    batch = StepBatch(num_seqs, context, prompt / chunks, 1, prompt * (prompt + 1) / 2 / chunks)
    decode_s = _decode_s(model, typical, num_seqs)
    longer_s = chunks * (model.seconds(batch) - decode_s)
    return num_seqs / (decode_s + num_seqs * longer_s / typical.output_tokens)


def _elasticity(model: LatencyModel, typical: TypicalRequest, num_seqs: int) -> float:
    """Relative growth of the tokens per second by that of the batch."""
    more, now = (_tokens_per_s(model, typical, size) for size in (num_seqs * _DIFFERENCE, num_seqs))
    return math.log(more / now) / math.log(_DIFFERENCE)


def _bound(model: LatencyModel, batch: StepBatch) -> Bound:
    parts = model.parts(batch)
    shares: dict[Bound, float] = {
        "memory": parts["weights"] + parts["kv"],
        "compute": parts["arithmetic"] + parts["attention"],
        "overhead": parts["overhead"],
    }
    return max(shares, key=lambda name: shares[name])


# --- text

_WIDTH = 100
_WIDE = 20  # a range of latencies that is shown on a logarithmic axis


def curve_text(curve: Curve) -> str:
    """The table with its marks, and a chart for a terminal."""
    typical = curve.typical
    lines = [
        f"{curve.title}: prompts of {typical.prompt_tokens} tokens, answers of {typical.output_tokens}",
        "",
        f"  {'sequences':>9}{'tokens/s':>10}{'ITL p50':>11}{'ITL p99':>11}{'TTFT':>11}  bound by",
    ]
    for point in curve.shown:
        times = "".join(f"{_ms(seconds):>11}" for seconds in (point.itl_p50_s, point.itl_p99_s, point.ttft_s))
        marks = "".join(f"  <- {mark}" for mark in _marks(curve, point.num_seqs))
        lines.append(f"  {point.num_seqs:>9}{point.tokens_per_s:>10,.0f}{times}  {point.bound:<8}{marks}".rstrip())
    lines += ["", *(f"  {line}" for line in _summary(curve))]
    if len(curve.points) > 1:
        lines += ["", *_text_charts(curve)]
    return "\n".join(lines)


def _marks(curve: Curve, num_seqs: int) -> Iterator[str]:
    if num_seqs == curve.knee:
        yield "knee"
    if num_seqs == curve.within_slo:
        yield "largest within the targets"


def _summary(curve: Curve) -> Iterator[str]:
    knee = curve.at(curve.knee)
    yield (
        f"knee: {curve.knee} sequences, {knee.tokens_per_s:,.0f} tokens/s; beyond it, 1 % more sequences add less than "
        f"{KNEE_ELASTICITY} % to the tokens/s"
    )
    if curve.within_slo is not None:
        yield f"targets: {_target_text(curve)}"
    yield f"the curve ends at {len(curve.points)}: {curve.limited_by}"


def _target_text(curve: Curve) -> str:
    given = (("ITL p99", curve.itl_p99_s), ("TTFT p99", curve.ttft_p99_s))
    targets = " and ".join(f"{name} of {_ms(value)}" for name, value in given if value is not None)
    if not curve.within_slo:
        return f"even one sequence misses {targets}"
    point = curve.at(curve.within_slo)
    return f"{targets}: up to {curve.within_slo} sequences, {point.tokens_per_s:,.0f} tokens/s"


def _text_charts(curve: Curve) -> Iterator[str]:
    points = _spread(curve.points, 60)
    sizes = [point.num_seqs for point in points]
    marks = {"knee": float(curve.knee)}
    if curve.within_slo:
        marks["targets"] = float(curve.within_slo)
    yield "  tokens/s over the sequences that decode at once"
    yield text_chart(sizes, {"tokens/s": [p.tokens_per_s for p in points]}, width=_WIDTH - 20, height=9, log_x=True,
                     marks=marks)  # fmt: skip
    yield ""
    yield "  ITL in ms"
    series = {"p50": [p.itl_p50_s * 1e3 for p in points], "p99": [p.itl_p99_s * 1e3 for p in points]}
    is_wide = points[-1].itl_p99_s > _WIDE * points[0].itl_p50_s
    yield text_chart(sizes, series, width=_WIDTH - 20, height=9, log_x=True, log_y=is_wide)


def _spread(points: Sequence[CurvePoint], count: int) -> list[CurvePoint]:
    """About `count` of them, evenly on a logarithmic axis."""
    last = len(points)
    sizes = {round(last ** (step / (count - 1))) for step in range(count)}
    return [points[size - 1] for size in sorted(sizes)]


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:,.1f} ms"


# --- plot


def draw_curve(curve: Curve) -> Figure:
    """Three panels over the batch size: tokens/s, ITL and TTFT, with the regions and the marks."""
    points = _spread(curve.points, 200)
    sizes = [point.num_seqs for point in points]
    milliseconds: dict[str, dict[str, Callable[[CurvePoint], float]]] = {
        "Inter-token latency, ms": {"p50": lambda p: p.itl_p50_s * 1e3, "p99": lambda p: p.itl_p99_s * 1e3},
        "Time to first token, ms": {"_": lambda p: p.ttft_s * 1e3},
    }
    with style():
        drawn, axes = figure("", size_inches=(8, 8), nrows=3, sharex=True)
        _panel(axes[0], curve, sizes, "Output tokens per second", {"_": [p.tokens_per_s for p in points]})
        _region_names(axes[0], curve)
        targets = (curve.itl_p99_s, curve.ttft_p99_s)
        for panel, (title, series), target_s in zip(axes[1:], milliseconds.items(), targets, strict=True):
            _panel(panel, curve, sizes, title, {name: [of(p) for p in points] for name, of in series.items()})
            if target_s is not None:
                _target_line(panel, target_s)
        axes[-1].set_xlabel("sequences that decode at once")
        typical = curve.typical
        subtitle = f"prompts of {typical.prompt_tokens} tokens, answers of {typical.output_tokens}; {curve.limited_by}"
        entitle(drawn, curve.title, subtitle)
    return drawn


def _target_line(panel: Axes, target_s: float) -> None:
    """A line at the target; one that is far above the curve is named in the title instead."""
    label = f"target: {_ms(target_s)}"
    if target_s * 1e3 > panel.get_ylim()[1]:
        panel.set_title(f"{panel.get_title(loc='left')} ({label})")
        return
    panel.axhline(target_s * 1e3, color=GREY, linestyle=":", linewidth=1.2, marker="")
    at, across = (0.3, target_s * 1e3), panel.get_yaxis_transform()  # between the legend and where the curve rises
    panel.annotate(label, at, (0, 3), across, "offset points", color=GREY, fontsize=8)


def _panel(axes: Axes, curve: Curve, sizes: Sequence[int], title: str, series: dict[str, list[float]]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for (name, values), colour in zip(series.items(), COLOURS, strict=False):
        axes.plot(sizes, values, color=colour, label=name, marker="")
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, max(2, sizes[-1]))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    for low, high, bound in curve.regions:
        if bound != "memory":
            axes.axvspan(low, high, color=PALE, alpha=0.25, linewidth=0)
    for size, name, colour in _lines(curve):
        label = None if len(series) > 1 else name
        axes.axvline(size, color=colour, linestyle="--", linewidth=1.2, marker="", label=label)
    axes.legend(loc="upper left")


def _lines(curve: Curve) -> Iterator[tuple[int, str, str]]:
    yield curve.knee, f"knee: {curve.knee}", COLOURS[3]
    if curve.within_slo:
        yield curve.within_slo, f"within the targets: {curve.within_slo}", COLOURS[2]


def _region_names(axes: Axes, curve: Curve) -> None:
    for low, high, bound in curve.regions:
        if high > 1.3 * low:
            at = math.sqrt(low * high)
            name = "overhead" if bound == "overhead" else f"{bound}-bound"
            axes.annotate(name, (at, 0.04), xycoords=axes.get_xaxis_transform(), ha="center", color=GREY, fontsize=8)
