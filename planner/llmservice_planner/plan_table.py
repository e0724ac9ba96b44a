"""A plan for people: the answer, a bar of the memory, and each line of the working."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from llmservice_planner.explanation import format_bytes
from llmservice_planner.gpu import GIB, GPUS
from llmservice_planner.sizing import Plan, SizingRequest

_WIDTH = 100
_BAR = 60


def plan_table(request: SizingRequest, answer: Plan) -> str:
    """Plain text of at most 100 columns; the working's lines are `answer.explanation`, aligned."""
    lines = [_headline(request, answer), ""]
    if answer.fits:
        lines += [*_memory_bar(request, answer), ""]
    lines += _working(answer)
    if answer.remedies:
        lines += ["", "What would make it fit, each alone:"]
        lines += [f"  - {remedy}" for remedy in answer.remedies]
    elif not answer.fits:
        lines += ["", "Nothing in the catalogue makes it fit: choose a smaller model."]
    return "\n".join(lines)


def gpu_table() -> str:
    """The catalogue: what a process sees of each card's memory, and its dense rates."""
    lines = [f"{'PRODUCT':<16}{'MEMORY GiB':>11}{'GB/s':>7}{'BF16 TFLOP/s':>14}{'FP8 TFLOP/s':>13}  NODE LABEL"]
    for card in GPUS.values():
        bandwidth = _rate(card.bandwidth_bytes_per_s, 1e9)
        half, fp8 = _rate(card.flops_16bit, 1e12), _rate(card.flops_fp8, 1e12)
        lines.append(
            f"{card.name:<16}{card.memory_bytes / GIB:>11.2f}{bandwidth:>7}{half:>14}{fp8:>13}  {card.node_labels[0]}"
        )
    return "\n".join(lines)


def _rate(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.0f}"


def _headline(request: SizingRequest, answer: Plan) -> str:
    cards = f"{request.device_count} x " if request.device_count > 1 else ""
    where = f"on {cards}{request.device.name}"
    if not answer.fits:
        return f"DOES NOT FIT {where}: {format_bytes(answer.shortfall_bytes)} are missing"
    return f"FITS {where}: {answer.max_num_seqs} sequences at once, limited by {answer.limited_by}"


def _memory_bar(request: SizingRequest, answer: Plan) -> Iterator[str]:
    total = request.device_count * request.device.memory_bytes
    spent = answer.weights_bytes + answer.overhead_bytes + answer.kv_pool_bytes
    parts = (
        ("weights", "W", answer.weights_bytes),
        ("overhead", "o", answer.overhead_bytes),
        ("KV cache", "k", answer.kv_pool_bytes),
        ("unused", ".", total - spent),
    )
    edges = [0]
    for _, _, size in parts:
        edges.append(edges[-1] + size)
    columns = [round(edge * _BAR / total) for edge in edges]
    bar = "".join(mark * (columns[i + 1] - columns[i]) for i, (_, mark, _) in enumerate(parts))
    yield f"  [{bar}]"
    yield "  " + "   ".join(f"{mark} {name} {format_bytes(size)}" for name, mark, size in parts)


def _working(answer: Plan) -> Iterator[str]:
    pairs = [line.split(": ", 1) for line in answer.explanation]
    width = max(len(label) for label, _ in pairs)
    previous = ""
    for label, text in pairs:
        shown = label if label != previous else ""
        previous = label
        indent = " " * (width + 4)
        yield textwrap.fill(text, _WIDTH, initial_indent=f"  {shown:<{width}}  ", subsequent_indent=indent)
