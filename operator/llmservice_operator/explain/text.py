"""An explanation as text: what is wrong first, 100 columns, colour only on request."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from llmservice_operator.api.status import AutoscalingStatus, DecisionStatus, DemandStatus, SizingStatus
from llmservice_operator.explain.explanation import Explanation
from llmservice_operator.pods.pod import epoch

WIDTH = 100
_DECISIONS = 5
"""That are shown, of those that the status has."""
_RED, _GREEN, _BOLD, _PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[1m", "\x1b[0m"
_UNITS = ((86_400, "d"), (3600, "h"), (60, "m"))


def render(explanation: Explanation, now: float, *, colour: bool) -> str:
    """The whole text; `now` in seconds since 1970."""
    blocks = [_head(explanation, now), _sizing(explanation.sizing), _scaling(explanation, now), _pods(explanation, now)]
    blocks.append(_events(explanation, now))
    text = "\n\n".join("\n".join(lines) for block in blocks if (lines := list(block)))
    return (_coloured(text, healthy=explanation.healthy) if colour else text) + "\n"


def age(timestamp: str, now: float) -> str:
    """How long ago, in the largest unit: 5s, 3m, 2h, 9d."""
    seconds = max(0, int(now - epoch(timestamp)))
    return next((f"{seconds // size}{unit}" for size, unit in _UNITS if seconds >= size), f"{seconds}s")


def _head(explanation: Explanation, now: float) -> Iterator[str]:
    yield f"{explanation.name} in {explanation.namespace}: {explanation.model}, served as {explanation.served_name}"
    yield from _wrapped("OK  " if explanation.healthy else "!!  ", explanation.headline)
    for problem in explanation.problems:
        since = f" for {age(problem.since, now)}" if problem.since else ""
        yield ""
        yield from _wrapped("    ", f"{problem.condition}: {problem.reason}{since}")
        if problem.message not in explanation.headline:
            yield from _wrapped("      ", problem.message)
        if problem.remedy:
            yield from _wrapped("      -> ", problem.remedy)


def _sizing(sizing: SizingStatus | None) -> Iterator[str]:
    if sizing is None:
        return
    yield f"Sizing: at most {sizing.max_num_seqs} sequences in a step, limited by {sizing.limited_by}"
    if not sizing.kv_bytes_per_token:
        yield f"  a step holds {sizing.guaranteed_sequences} inputs of {sizing.max_model_len} tokens; no KV cache"
        yield f"  weights {sizing.weights_gib:g} GiB + overhead {sizing.overhead_gib:g} GiB"
        yield from _explained(sizing)
        return
    expected = f"{sizing.expected_sequences} of the expected length"
    yield f"  the KV cache holds {sizing.guaranteed_sequences} sequences of {sizing.max_model_len} tokens, {expected}"
    spent = f"weights {sizing.weights_gib:g} GiB + overhead {sizing.overhead_gib:g} GiB"
    yield f"  {spent}, KV pool {sizing.kv_pool_gib:g} GiB at {sizing.kv_bytes_per_token:,} B per token"
    yield _measured(sizing)
    yield from _explained(sizing)


def _explained(sizing: SizingStatus) -> Iterator[str]:
    for line in sizing.explanation.splitlines():
        yield from _wrapped("  | ", line)


def _measured(sizing: SizingStatus) -> str:
    if sizing.measured is None:
        return f"  blocks: {sizing.blocks:,} predicted, none measured yet"
    error = sizing.measured.error_percent
    if error is None:
        return f"  blocks: {sizing.measured.blocks:,} chosen by the server, which sized itself"
    word = "as predicted" if error == 0 else f"{abs(error):g} % too {'many' if error > 0 else 'few'} predicted"
    return f"  blocks: {sizing.blocks:,} predicted, {sizing.measured.blocks:,} measured by the pods ({word})"


def _scaling(explanation: Explanation, now: float) -> Iterator[str]:
    replicas = explanation.replicas
    bounds = ", fixed" if replicas.max is None else f", {replicas.min} to {replicas.max} allowed"
    yield f"Scaling: {replicas.ready} of {replicas.desired} replicas ready{bounds}"
    known = explanation.autoscaling
    if known is None:
        return
    if known.demand is not None:
        yield from _demand(known.demand)
    if known.gpu_hours is not None:
        yield f"  cost: {known.gpu_hours.hours:g} GPU-hours on {known.gpu_hours.day} (UTC)"
    yield from _signals(known)
    if (start := known.last_cold_start) is not None:
        parts = f"scheduling {start.scheduling:g}, fetching {start.fetching:g}, loading {start.loading:g}"
        whole = f"  the last start from zero, {age(start.ready_at, now)} ago, took {start.seconds:g} s: "
        yield from _wrapped(whole, f"{parts}, compiling {start.compiling:g}")
    for number, decision in enumerate(known.decisions[:_DECISIONS], start=1):
        before = known.decisions[number] if number < len(known.decisions) else None
        yield from _decision(decision, before, now)


def _demand(demand: DemandStatus) -> Iterator[str]:
    arriving = f"{demand.requests_per_second:g}/s with {demand.prompt_tokens_per_second:,.0f} prompt tokens/s"
    yield f"  demand: {arriving} to compute and {demand.output_tokens_per_second:,.0f} output tokens/s"
    if demand.replica_requests_per_second is not None:
        serves = f"{demand.replica_requests_per_second:g}/s ({demand.replica_tokens_per_second:,.0f} tokens/s)"
        yield f"  one replica serves {serves} of it, as {demand.source}"
    ahead = f"{demand.predicted_load:g} in {demand.horizon_seconds} s"
    burst = ", in a burst" if demand.burst else ""
    yield f"  load: {demand.load:g} replicas busy all the time, {ahead}{burst}"


def _signals(known: AutoscalingStatus) -> Iterator[str]:
    if known.signals:
        yield f"  {'signal':<12} {'now':>8} {'threshold':>10}"
    for signal in known.signals:
        over = signal.value is not None and signal.target is not None and signal.value > signal.target
        mark = "  <- over" if over else ""
        yield f"  {signal.name:<12} {_figure(signal.value):>8} {_figure(signal.target):>10}  {signal.unit}{mark}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _decision(decision: DecisionStatus, before: DecisionStatus | None, now: float) -> Iterator[str]:
    change = f"{before.replicas} -> {decision.replicas}" if before else f"{decision.replicas}"
    yield f"  {age(decision.time, now)} ago: {change} replicas"
    for reason in decision.reasons:
        yield from _wrapped("      ", reason)


def _pods(explanation: Explanation, now: float) -> Iterator[str]:
    yield "Pods:" if explanation.pods else "Pods: none"
    for pod in explanation.pods:
        restarts = f", {pod.restarts} restarts" if pod.restarts else ""
        yield f"  {pod.name}  {pod.state}, {age(pod.created, now)} old{restarts}"
        if pod.message:
            yield from _wrapped("      ", pod.message)
        if pod.last_line and pod.last_line != pod.message:
            yield from _wrapped("      log: ", pod.last_line)


def _events(explanation: Explanation, now: float) -> Iterator[str]:
    if explanation.events:
        yield "Events:"
    for event in explanation.events:
        times = f" (x{event.count})" if event.count > 1 else ""
        yield from _wrapped(f"  {age(event.time, now):>4} ago  ", f"{event.reason}{times}: {event.message}")


def _wrapped(lead: str, text: str) -> list[str]:
    """Lines of at most `WIDTH`; a word that is longer is cut."""
    indent = " " * len(lead)
    lines = textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False)
    return lines or [lead.rstrip()]


def _coloured(text: str, *, healthy: bool) -> str:
    lines = text.split("\n")
    lines[0] = f"{_BOLD}{lines[0]}{_PLAIN}"
    lines[1] = f"{_GREEN if healthy else _RED}{lines[1]}{_PLAIN}"
    return "\n".join(lines)
