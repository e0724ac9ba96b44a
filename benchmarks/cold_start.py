"""The time of a start by phase, in a new process: `python benchmarks/cold_start.py MODEL` prints JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def phases(model: Path) -> dict[str, float]:
    """Seconds by phase. The weights are read twice; `rest_of_start_s` is the second start without reading them."""
    begun_s = time.perf_counter()
    from llmservice_server.runtime.startup import load_engine

    imported_s = time.perf_counter()
    import torch

    from llmservice_server.engine.config import EngineConfig
    from llmservice_server.runtime.loader import Checkpoint
    from llmservice_server.text.tokenizer import Tokenizer
    from llmservice_server.types.messages import GenerateRequest, SamplingParams

    checkpoint = Checkpoint.open(model)
    checkpoint.load(checkpoint.dtype("auto"), torch.device("cpu"))
    loaded_s = time.perf_counter()
    tokenizer = Tokenizer.load(model)
    tokenized_s = time.perf_counter()
    engine = load_engine(EngineConfig(model=model, kv_cache_memory_bytes=1 << 28))
    started_s = time.perf_counter()
    sampling = SamplingParams(max_tokens=1)
    prompt = tokenizer.encode("The first words of a prompt.")
    engine.add(
        GenerateRequest(request_id="first", prompt_token_ids=prompt, sampling=sampling, arrival_s=time.monotonic())
    )
    while not engine.step().outputs:
        pass
    first_s = time.perf_counter()
    return {
        "imports_s": imported_s - begun_s,
        "weights_s": loaded_s - imported_s,
        "tokenizer_s": tokenized_s - loaded_s,
        "rest_of_start_s": (started_s - tokenized_s) - (loaded_s - imported_s),
        "first_token_s": first_s - started_s,
    }


if __name__ == "__main__":
    print(json.dumps(phases(Path(sys.argv[1]))))
