"""The demo's load: first how much one replica holds, then more than that."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp

from llmservice_bench.client import Target
from llmservice_bench.drive import Load, Progress, drive
from llmservice_bench.lengths import Lengths, read_trace
from llmservice_bench.prompt import WordRate
from llmservice_bench.record import RequestRecord
from llmservice_bench.report import Report
from llmservice_planner.command import CommandError

CALIBRATION_SHARE = 0.75
"""Of a replica's slots, while its capacity is measured: below the share at which the operator would add another."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one replica delivered while kept busy, with no queue."""

    requests_per_s: float
    output_tokens_per_s: float
    concurrency: int
    failed: int


def trace_lengths(scale: float, max_model_len: int) -> list[Lengths]:
    """The bundled trace's lengths, scaled down; the few that would still not fit the model's context are left out.

    Raises:
        CommandError: none is left.
    """
    scaled = [lengths.scaled(scale) for lengths in read_trace()]
    # A tenth is left free: lengths are asked for in words, which is only nearly right in tokens.
    fitting = [each for each in scaled if (each.prompt_tokens + each.output_tokens) * 1.1 <= max_model_len]
    if not fitting:
        raise CommandError(f"no request of the trace fits {max_model_len} tokens at --scale {scale}: lower it")
    return fitting


async def calibrate(
    session: aiohttp.ClientSession,
    target: Target,
    lengths: list[Lengths],
    word_rate: WordRate,
    max_num_seqs: int,
    duration_s: float,
) -> Calibration:
    """Keep most of one replica's slots busy for `duration_s` (a closed loop) and count what comes out.

    Raises:
        CommandError: nothing did.
    """
    concurrency = max(1, int(max_num_seqs * CALIBRATION_SHARE))
    load = Load(lengths, max_concurrency=concurrency, duration_s=duration_s, seed=1)
    report = Report.of(await drive(session, target, load, word_rate))
    if not report.completed:
        raise CommandError(f"no request completed while the capacity was measured: {report.failures}", status=1)
    return Calibration(report.requests_per_s, report.output_tokens_per_s, concurrency, report.failed)


async def overload(
    session: aiohttp.ClientSession,
    target: Target,
    lengths: list[Lengths],
    word_rate: WordRate,
    rate: float,
    duration_s: float,
    progress: Progress,
) -> list[RequestRecord]:
    """An open loop of Poisson arrivals at `rate` requests a second; returns once the last has been answered."""
    load = Load(lengths, rate=rate, duration_s=duration_s, seed=2)
    return await drive(session, target, load, word_rate, progress)
