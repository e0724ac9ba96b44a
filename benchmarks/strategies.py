"""Static, dynamic and continuous batching on the same trace, and long prompts whole or in chunks: the gap measured.

The engine runs in this process, without HTTP. Each strategy is first given the whole trace at once, which shows its
throughput, and then the same trace at a rate that continuous batching can just bear, which shows its latencies: where a
strategy delivers less than that rate, its waits grow with the length of the run. Lengths are those of the Azure
conversation trace, scaled; arrivals are Poisson. JSON with all figures goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmservice_bench.arrivals import arrival_times
from llmservice_bench.lengths import Lengths, draw, read_trace
from llmservice_bench.record import RequestRecord
from llmservice_bench.report import Report, machine
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.messages import Generate, Output, SamplingParams
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model

RESULTS = Path(__file__).with_name("results")
SPEC = TinyModelSpec(layers=4, hidden_size=512, heads=8, kv_heads=4, max_position_embeddings=2048)
MAX_NUM_SEQS = 16
LOAD = 0.7
"""Of the requests per second that continuous batching delivers."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "static": {"scheduler": "static", "max_batch_wait_s": 5.0},
    "dynamic": {"scheduler": "dynamic", "max_batch_wait_s": 0.05},
    "continuous": {"scheduler": "continuous", "prefix_caching": False},
}
CHUNKS: dict[str, dict[str, Any]] = {
    "prompts whole": {"prefix_caching": False, "prefill_chunk_tokens": 2048},
    "chunks of 128": {"prefix_caching": False, "prefill_chunk_tokens": 128},
}


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt_token_ids: list[int]
    output_tokens: int


@dataclass(slots=True)
class Waste:
    """Sums over the steps of a run."""

    tokens: int = 0
    padding: int = 0
    block_tokens: int = 0  # what the held blocks have room for
    cached_tokens: int = 0  # and what of it holds keys and values

    def observe(self, engine: Engine, block_size: int) -> None:
        plan = engine.last_plan
        self.tokens += plan.num_tokens
        self.padding += plan.num_padding
        self.block_tokens += engine.pool.num_held * block_size
        self.cached_tokens += sum(request.num_computed_tokens for request in engine.scheduler.running)

    @property
    def of_padding(self) -> float:
        """Share of the computed tokens that meant nothing."""
        return self.padding / max(1, self.tokens + self.padding)

    @property
    def of_kv_cache(self) -> float:
        """Share of the held memory that held nothing of use."""
        return 1 - self.cached_tokens / max(1, self.block_tokens)


@dataclass(slots=True)
class Run:
    """Drives one engine through arrivals, in real time."""

    engine: Engine
    arrivals: Sequence[Arrival]
    records: dict[str, RequestRecord] = field(default_factory=dict)
    waste: Waste = field(default_factory=Waste)
    _last_s: dict[str, float] = field(default_factory=dict)

    def run(self) -> Report:
        started_s = time.monotonic()
        coming = iter(enumerate(self.arrivals))
        following = next(coming, None)
        while following is not None or self.engine.has_work:
            while following is not None and started_s + following[1].at_s <= time.monotonic():
                self._send(*following, started_s)
                following = next(coming, None)
            wait_s = self.engine.wait_s()
            if following is not None:
                wait_s = min(wait_s, started_s + following[1].at_s - time.monotonic())
            if wait_s > 0:
                time.sleep(wait_s)
                continue
            outputs = self.engine.step().outputs
            self.waste.observe(self.engine, self.engine.ready.block_size)
            now = time.monotonic()
            for output in outputs:
                self._receive(output, now)
        return Report.of(self.records.values())

    def _send(self, number: int, arrival: Arrival, started_s: float) -> None:
        request_id, arrival_s = str(number), started_s + arrival.at_s
        sampling = SamplingParams(max_tokens=arrival.output_tokens, temperature=0.0)
        self.engine.add(
            Generate(
                request_id=request_id,
                prompt_token_ids=arrival.prompt_token_ids,
                sampling=sampling,
                arrival_s=arrival_s,
            )
        )
        self.records[request_id] = RequestRecord(arrival.at_s, len(arrival.prompt_token_ids))
        self._last_s[request_id] = arrival_s

    def _receive(self, output: Output, now: float) -> None:
        record = self.records[output.request_id]
        record.error = output.error
        gap_s, self._last_s[output.request_id] = now - self._last_s[output.request_id], now
        if record.output_tokens == 0:
            record.ttft_s = gap_s
        else:
            record.itl_s.append(gap_s)
        record.output_tokens += len(output.token_ids)
        record.e2e_s += gap_s


def arrivals_of(lengths: Sequence[Lengths], rate: float, seed: int = 0) -> list[Arrival]:
    """The same requests at every rate; an infinite one brings all at once."""
    rng, times = np.random.default_rng(seed), arrival_times(rate, 1.0, np.random.default_rng(seed + 1))
    return [
        Arrival(at_s, rng.integers(0, SPEC.vocab_size, each.prompt_tokens).tolist(), each.output_tokens)
        for each, at_s in zip(lengths, times, strict=False)
    ]


def measure(model: Path, settings: dict[str, Any], arrivals: Sequence[Arrival]) -> tuple[Report, Waste]:
    defaults = {"max_num_seqs": MAX_NUM_SEQS, "kv_cache_memory_bytes": 512 << 20, "max_num_batched_tokens": 2048}
    run = Run(Engine(EngineConfig(model=model, **defaults | settings)), arrivals)
    return run.run(), run.waste


def compare(
    model: Path, ways: dict[str, dict[str, Any]], lengths: Sequence[Lengths], load: float
) -> list[dict[str, Any]]:
    """One row a way, printed as it is measured; the last way's throughput sets the rate for all."""
    flooded = {name: measure(model, way, arrivals_of(lengths, float("inf"))) for name, way in ways.items()}
    rate = load * list(flooded.values())[-1][0].requests_per_s
    print(f"\nall at once, and at {rate:.2f} requests/s\n{HEADER}")
    rows = []
    for name, way in ways.items():
        at_once, waste = flooded[name]
        report, _ = measure(model, way, arrivals_of(lengths, rate))
        print(_line(name, at_once, report, waste))
        rows.append(
            {
                "name": name,
                **way,
                "rate": rate,
                "at_once": asdict(at_once),
                "at_rate": asdict(report),
                "padding_waste": waste.of_padding,
                "kv_waste": waste.of_kv_cache,
            }
        )
    return rows


HEADER = (
    f"{'':<15}{'tok/s at once':>14}{'at rate':>9}"
    + "".join(f"{f'{name} p50/p99 ms':>21}" for name in ("TTFT", "ITL", "E2E"))
    + f"{'padding':>9}{'KV waste':>10}"
)


def _line(name: str, at_once: Report, report: Report, waste: Waste) -> str:
    latencies = "".join(
        f"{f'{values.p50 * 1000:.1f} / {values.p99 * 1000:.1f}':>21}"
        for values in (report.ttft_s, report.itl_s, report.e2e_s)
    )
    throughput = f"{at_once.output_tokens_per_s:>14.0f}{report.output_tokens_per_s:>9.0f}"
    failed = f"  {report.failed + at_once.failed} failed" if report.failed + at_once.failed else ""
    return f"{name:<15}{throughput}{latencies}{waste.of_padding:>9.1%}{waste.of_kv_cache:>10.1%}{failed}"


def with_long_prompts(lengths: Sequence[Lengths], every: int = 10) -> list[Lengths]:
    """Every tenth prompt is so long that, computed whole, it holds everybody else up."""
    return [Lengths(1600, 8) if index % every == 0 else each for index, each in enumerate(lengths)]


def main(num_requests: int, scale: float) -> None:
    where = machine()
    print(f"Llama of {SPEC.layers} layers, {SPEC.hidden_size} wide, on {where['platform']}, {where['cpus']} CPUs")
    trace = itertools.islice(draw(read_trace(), np.random.default_rng(0)), num_requests)
    lengths = [
        Lengths(min(each.prompt_tokens, 1400), min(each.output_tokens, 400))
        for each in (e.scaled(scale) for e in trace)
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_tiny_model(model, SPEC)
        strategies = compare(model, STRATEGIES, lengths, LOAD)
        chunks = compare(model, CHUNKS, with_long_prompts(lengths), LOAD)
    RESULTS.mkdir(exist_ok=True)
    written = RESULTS / "strategies.json"
    content = {"machine": where, "requests": num_requests, "scale": scale, "strategies": strategies, "chunks": chunks}
    written.write_text(json.dumps(content, indent=2), encoding="utf-8")
    print(f"written: {written}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="of the trace, for every run")
    parser.add_argument("--scale", type=float, default=0.25, help="multiply the trace's lengths by this")
    arguments = parser.parse_args()
    main(arguments.requests, arguments.scale)
