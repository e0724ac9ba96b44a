"""A whole engine on the card: when it is ready, what it holds, what its steps reach of the card's ceilings."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from card.ceilings import Ceilings, seconds
from card.llama import read_seconds
from card.section import Findings
from llmservice_bench.results import Check
from llmservice_planner.gpu import find_gpu
from llmservice_planner.model_config import read_config
from llmservice_planner.shape import ModelShape
from llmservice_planner.sizing import plan
from llmservice_planner.sizing_request import SizingRequest
from llmservice_server.attention.base import SequenceSlice
from llmservice_server.engine import startup
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.engine.startup import Started
from llmservice_server.messages import Generate, Output, SamplingParams

MAX_NUM_SEQS = 256
CONTEXT = 1024


def start(folder: Path, **settings: object) -> Engine:
    return Engine(_config(folder, **settings))


def _config(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig(
        model=folder,
        device="cuda",
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        **settings,  # type: ignore[arg-type]
    )


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def readiness(folder: Path) -> Findings:
    """From nothing to a first token, beside what reading the weights takes; the blocks, beside the plan's."""
    reading_s = read_seconds(folder)
    started_s = time.perf_counter()
    phases_s: dict[str, float] = {}

    def start_and_tell(config: EngineConfig) -> Started:
        started = startup.start(config)
        phases_s.update(started.phases_s)
        return started

    engine = Engine(_config(folder), start=start_and_tell)
    add(engine, "first", any_prompt(8), 1)
    run_to_the_end(engine)
    ready_s = time.perf_counter() - started_s
    ready = engine.ready
    shape = ModelShape.from_config(read_config(folder))
    name = torch.cuda.get_device_name()
    predicted = plan(
        SizingRequest(
            shape=shape,
            device=find_gpu(name),
            max_model_len=8192,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=8192,
        )
    )
    off_by = abs(predicted.num_blocks - ready.num_blocks) / ready.num_blocks
    gib = {f"{kind} GiB": number / 2**30 for kind, number in ready.memory_bytes.items()}
    return Findings(
        rows=[
            {"part": "start", "reading s": reading_s, "ready s": ready_s, "engine's own count s": ready.load_s},
            {"part": "start by phase", **{f"{phase} s": seconds for phase, seconds in phases_s.items()}},
            {"part": "memory", "blocks": ready.num_blocks, "planned blocks": predicted.num_blocks, **gib},
        ],
        checks=[
            Check("ready beyond reading the weights", "<= 30", ready_s - reading_s, "s"),
            Check("planned KV blocks differ from measured (relative)", "<= 0.03", off_by),
        ],
    )


def steps(folder: Path, ceilings: Ceilings) -> Findings:
    """Decode steps in bytes read, prefill steps in FLOPs, without sampling."""
    engine = start(folder)
    found = Findings()
    runner, block_size = engine.runner, engine.ready.block_size
    weight_bytes = engine.ready.memory_bytes["weights"]
    kv_bytes_per_token = engine.ready.memory_bytes["kv_cache"] / (engine.ready.num_blocks + 1) / block_size
    blocks_each = CONTEXT // block_size
    found.notes.append(
        "decode steps run " + ("as CUDA graphs" if runner.decode_path is not None else "without CUDA graphs")
    )
    shares = []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        slices = [
            SequenceSlice(CONTEXT - 1, 1, range(1 + place * blocks_each, 1 + (place + 1) * blocks_each))
            for place in range(batch)
        ]
        tokens, positions = np.zeros(batch, np.int64), np.full(batch, CONTEXT - 1, np.int64)

        def step(tokens=tokens, positions=positions, slices=slices) -> None:  # type: ignore[no-untyped-def]
            with torch.inference_mode():
                runner.model.logits(runner._forward(tokens, positions, slices))

        taken_s = seconds(step, repetitions=20)
        embedding_bytes = runner.model.embed_tokens.nbytes  # of which a step reads a row a sequence
        read = weight_bytes - embedding_bytes + batch * CONTEXT * kv_bytes_per_token
        shares.append(read / taken_s / ceilings.copy_bytes_per_s)
        found.rows.append({
            "part": "decode step", "batch": batch, "context": CONTEXT, "ms": taken_s * 1e3,
            "tokens/s": batch / taken_s, "ITL p50 ms": taken_s * 1e3, "ITL p99 ms": taken_s * 1e3,
            "share of copy bandwidth": shares[-1],
        })  # fmt: skip
    found.checks.append(
        Check("decode at batch 1-64, 1k context: least share of copy bandwidth", ">= 0.75", min(shares))
    )
    found.add(_prefill(engine, ceilings))
    return found


def _prefill(engine: Engine, ceilings: Ceilings) -> Findings:
    found = Findings()
    runner, config = engine.runner, engine.runner.model.config
    parameters = engine.ready.memory_bytes["weights"] / 2 - 2 * config.vocab_size * config.hidden_size
    for length in (2048, 8192):
        taken_s = seconds(lambda length=length: runner.dummy_step(length, 1, length, engine.ready.block_size))  # type: ignore[misc]
        attention = config.num_layers * 4 * config.num_heads * config.head_dim * length * (length + 1) / 2
        share = (2 * parameters * length + attention) / taken_s / ceilings.matmul_flops
        found.rows.append({
            "part": "prefill step", "prompt": length, "ms": taken_s * 1e3, "TTFT ms": taken_s * 1e3,
            "share of matmul rate": share,
        })  # fmt: skip
        found.checks.append(Check(f"prefill of {length} tokens: share of the matmul rate", ">= 0.6", share))
    return found


def add(engine: Engine, name: str, prompt: list[int], output_tokens: int, **sampling: Any) -> None:
    """Exactly so many tokens, but for stop tokens that are named; greedy, unless `sampling` says otherwise."""
    params = SamplingParams(**{"max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True} | sampling)
    engine.add(Generate(request_id=name, prompt_token_ids=prompt, sampling=params, arrival_s=time.monotonic()))


def any_prompt(num_tokens: int) -> list[int]:
    return [(7 * place + num_tokens) % 1000 for place in range(num_tokens)]


def run_to_the_end(engine: Engine) -> list[Output]:
    """Whatever was finished on the way."""
    finished = []
    while engine.has_work:
        finished += [output for output in engine.step().outputs if output.finish_reason is not None]
    return finished
