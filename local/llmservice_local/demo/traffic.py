"""The demo's load: its lengths, and the throughput of one replica."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp

from llmservice_bench.client import Target, WordRate
from llmservice_bench.drive import Load, Progress, drive
from llmservice_bench.trace import Lengths, read_trace
from llmservice_planner.command import CommandError

CALIBRATION_SHARE = 0.75
"""Share of a replica's slots in use during calibration; the operator adds a replica at a higher share."""
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """The throughput of one replica with most of its slots in use and an empty waiting queue."""

    requests_per_s: float
    output_tokens_per_s: float
    failed: int


def trace_lengths(scale: float, max_model_len: int) -> list[Lengths]:
    """The bundled trace's lengths, scaled, without those that do not fit the model's context.

    Raises:
        CommandError: no length fits.
    """
    scaled = [lengths.scaled(scale) for lengths in read_trace()]
    # A margin of 10 %, because prompts are made of words, whose number of tokens is estimated.
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
    """Measure one replica's throughput for `duration_s` in a closed loop that uses most of its slots.

    Requests per second are tokens per second over the trace's mean output length, because with heavy-tailed lengths too
    few requests end in a few seconds.

    Raises:
        CommandError: no token was received.
    """
    concurrency = max(1, int(max_num_seqs * CALIBRATION_SHARE))
    load = Load(lengths, max_concurrency=concurrency, duration_s=WARM_UP_S + duration_s, seed=1)
    progress = Progress()
    driving = asyncio.create_task(drive(session, target, load, word_rate, progress))
    await asyncio.sleep(WARM_UP_S)
    before, started = progress.pieces, time.perf_counter()
    await asyncio.sleep(duration_s)
    pieces, seconds = progress.pieces - before, time.perf_counter() - started
    await driving
    if not pieces:
        raise CommandError("no token was received during calibration", status=1)
    output_tokens_per_s = pieces / seconds
    mean_output_tokens = sum(each.output_tokens for each in lengths) / len(lengths)
    return Calibration(output_tokens_per_s / mean_output_tokens, output_tokens_per_s, progress.failed)
