"""The demo's load: first how much one replica holds, then more than that."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp

from llmservice_bench.client import Target
from llmservice_bench.drive import Load, Progress, drive
from llmservice_bench.lengths import Lengths, read_trace
from llmservice_bench.prompt import WordRate
from llmservice_bench.record import RequestRecord
from llmservice_planner.command import CommandError

CALIBRATION_SHARE = 0.75
"""Of a replica's slots, while its capacity is measured: below the share at which the operator would add another."""
WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one replica delivered with most of its slots busy and nothing waiting."""

    requests_per_s: float
    output_tokens_per_s: float
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
    """Keep most of one replica's slots busy (a closed loop) and count the tokens that come out in `duration_s`.

    Tokens, not requests: with heavy-tailed lengths a few seconds hold too few requests to count. The trace's mean
    length makes requests of them.

    Raises:
        CommandError: nothing came out.
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
        raise CommandError("no token came out while the capacity was measured", status=1)
    output_tokens_per_s = pieces / seconds
    mean_output_tokens = sum(each.output_tokens for each in lengths) / len(lengths)
    return Calibration(output_tokens_per_s / mean_output_tokens, output_tokens_per_s, progress.failed)


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
