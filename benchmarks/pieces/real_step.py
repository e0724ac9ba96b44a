"""How long a step takes on a real shape: what the host's share of it is measured against."""

from __future__ import annotations

import time
from statistics import median

from llmservice_bench.models import SHAPES, checkpoint
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.messages import Generate, SamplingParams
from pieces.decoding import decode_together

_PROMPT_TOKENS = 8  # short: the step is the shorter, and the host's share the larger


def measure_real_step(model: str, num_running: int, steps: int = 5) -> float:
    """Seconds of a step in which `num_running` sequences decode; the median."""
    engine = Engine(EngineConfig(model=checkpoint(model), max_num_seqs=num_running, kv_cache_memory_bytes=1 << 29))
    sampling = SamplingParams(max_tokens=2 * steps, temperature=0.0, ignore_eos=True)
    for number in range(num_running):
        prompt = [(number * place) % SHAPES[model].vocab_size for place in range(_PROMPT_TOKENS)]
        engine.add(Generate(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0))
    decode_together(engine, num_running)
    seconds = []
    for _ in range(steps):
        started_s = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started_s)
    return median(seconds)
