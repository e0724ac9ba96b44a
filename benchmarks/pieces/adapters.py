"""LoRA adapters: what slots cost requests without an adapter, how long a load takes, and what memory loads leave."""

from __future__ import annotations

import gc
import itertools
import resource
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from llmservice_bench.models import SHAPES, checkpoint
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.runtime.startup import load_engine
from llmservice_server.tiny.adapter import write_tiny_adapter
from llmservice_server.types.messages import GenerateRequest, LoadAdapter, SamplingParams, UnloadAdapter
from pieces.step import decode_together

MODEL = "small"
RANK = 80
"""An adapter of that rank on all linear layers of the model has 52 MB in float32."""
NUM_STREAMS = 8
ROUNDS = 12
"""Rounds, in which the kinds of steps alternate, so that the speed of a shared machine is that of all."""
STEPS = 20
_PROMPT_TOKENS = 8
_WARM_UP_LOADS = 50
_IDS = map(str, itertools.count())


def measure_adapters() -> dict[str, Any]:
    """Decode steps of 8 streams, with slots and without; and the longest step while an adapter is loaded."""
    without, with_slots = _engine(max_loras=0), _engine(max_loras=4, max_lora_rank=RANK)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_adapter(Path(folder), checkpoint(MODEL), rank=RANK)
        file_bytes = (Path(folder) / "adapter_model.safetensors").stat().st_size
        _change(with_slots, LoadAdapter(request_id=next(_IDS), name="one", folder=folder))
        mixed = _engine(max_loras=4, max_lora_rank=RANK)
        _change(mixed, LoadAdapter(request_id=next(_IDS), name="one", folder=folder))
        for engine, adapter in ((without, None), (with_slots, None), (mixed, "one")):
            for number in range(NUM_STREAMS):
                engine.add(_request(number, adapter if number == 0 else None))
            decode_together(engine, NUM_STREAMS)
        rounds = [[_step_s(engine) for engine in (without, with_slots, mixed)] for _ in range(ROUNDS)]
        plain_s, slots_s, mixed_s = (median(times) for times in zip(*rounds, strict=True))
        load_s, longest_s, num_failed = [], [], 0
        for number in range(5):
            load = LoadAdapter(request_id=next(_IDS), name=f"new{number}", folder=folder)
            taken_s, step_s, failed = _change(with_slots, load)
            load_s.append(taken_s)
            longest_s.append(step_s)
            num_failed += failed
    return {
        "streams": NUM_STREAMS,
        "without_slots_step_ms": plain_s * 1000,
        "with_slots_step_ms": slots_s * 1000,
        "slowdown_percent": 100 * (median(slots / plain for plain, slots, _ in rounds) - 1),
        "one_of_8_with_an_adapter_step_ms": mixed_s * 1000,
        "adapter_mb": file_bytes / 1e6,
        "load_beside_streams_s": median(load_s),
        "longest_step_beside_load_ms": max(longest_s) * 1000,
        "failed_requests": num_failed,
    }


def measure_adapter_memory(loads: int) -> dict[str, Any]:
    """Growth of the resident memory over `loads` loads and unloads, after the first 50."""
    engine = _engine(max_loras=2, max_lora_rank=8)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_adapter(Path(folder), checkpoint(MODEL), rank=8)

        def load_and_unload(times: int) -> None:
            for number in range(times):
                _change(engine, LoadAdapter(request_id=next(_IDS), name=f"a{number}", folder=folder))
                _change(engine, UnloadAdapter(request_id=next(_IDS), name=f"a{number}"))

        load_and_unload(_WARM_UP_LOADS)
        before = _resident_bytes()
        load_and_unload(loads)
        growth = _resident_bytes() - before
    return {"loads": loads, "growth_mib": growth / 2**20}


def _engine(**settings: Any) -> Engine:
    return load_engine(
        EngineConfig(model=checkpoint(MODEL), max_num_seqs=NUM_STREAMS, kv_cache_memory_bytes=1 << 28, **settings)
    )


def _request(number: int, adapter: str | None) -> GenerateRequest:
    prompt = [(number * place) % SHAPES[MODEL].vocab_size for place in range(_PROMPT_TOKENS)]
    sampling = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    return GenerateRequest(
        request_id=next(_IDS), prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0, adapter=adapter
    )


def _step_s(engine: Engine) -> float:
    seconds = []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began_s)
    return median(seconds)


def _change(engine: Engine, message: LoadAdapter | UnloadAdapter) -> tuple[float, float, int]:
    """Seconds until the change is reported, the longest step meanwhile, and failed requests."""
    began_s, longest_s, failed = time.perf_counter(), 0.0, 0
    engine.change_adapter(message)
    while True:
        stepped_s = time.perf_counter()
        outputs = engine.step()
        longest_s = max(longest_s, time.perf_counter() - stepped_s)
        failed += sum(output.error is not None for output in outputs.outputs)
        for report in outputs.adapters:
            if report.request_id == message.request_id:
                if report.error is not None:
                    raise ValueError(report.error)
                return time.perf_counter() - began_s, longest_s, failed


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
