"""The sums of step times that a server of ours reports (`steps` of GET /sizing), and samples of what lies between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import aiohttp

from llmservice_bench.calibration.fit import Kind, Sample
from llmservice_planner.sizing.latency import StepBatch


@dataclass(frozen=True, slots=True)
class Sums:
    """Of all steps of one kind with about as many sequences, since the server's start."""

    steps: int
    seconds: float
    num_seqs: int
    context_tokens: int
    prompt_tokens: int
    prompt_chunks: int
    attention_pairs: int


StepSums = Mapping[tuple[str, int], Sums]
"""By kind and number of sequences, as the server groups them."""

_NONE = Sums(0, 0.0, 0, 0, 0, 0, 0)


def parse(report: Any) -> StepSums:
    """From the JSON of /sizing; empty if it has no such sums."""
    try:
        return {
            (str(group["kind"]), int(group["sequences"])): Sums(
                **{item.name: group[item.name] for item in fields(Sums)}
            )
            for group in report["steps"]
        }
    except (KeyError, TypeError, ValueError):
        return {}


async def fetch_report(session: aiohttp.ClientSession, url: str) -> Mapping[str, Any] | None:
    """What a server answers to GET /sizing; None if it is none of ours."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
            report = await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    return report if isinstance(report, Mapping) and "max_num_seqs" in report else None


async def fetch_step_sums(session: aiohttp.ClientSession, url: str) -> StepSums:
    return parse(await fetch_report(session, url))


def samples_between(before: StepSums, after: StepSums, phase: str) -> list[Sample]:
    """A sample for each group that had steps in between: their mean time and composition."""
    samples = []
    for key, now in after.items():
        then = before.get(key, _NONE)
        steps = now.steps - then.steps
        if steps <= 0 or now.seconds <= then.seconds:
            continue
        mean = {
            name: (getattr(now, name) - getattr(then, name)) / steps
            for name in ("num_seqs", "context_tokens", "prompt_tokens", "prompt_chunks", "attention_pairs")
        }
        batch = StepBatch(**mean)
        kind: Kind = "decode" if not batch.prompt_tokens else "mixed" if batch.num_seqs else "prefill"
        samples.append(Sample(kind, (batch,), (now.seconds - then.seconds) / steps, phase=phase))
    return samples
