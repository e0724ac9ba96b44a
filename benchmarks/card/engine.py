"""A whole engine on the card: when it is ready, what it holds, what its steps reach of the card's ceilings."""

from __future__ import annotations

import time

import numpy as np
import torch

from card import llama
from card.card import seconds
from card.section import Findings
from card.stand import Stand, add, any_prompt, run_to_the_end
from llmservice_bench.results import Check
from llmservice_planner.model_config import read_config
from llmservice_planner.shape import ModelShape
from llmservice_planner.sizing import plan
from llmservice_planner.sizing_request import SizingRequest
from llmservice_server.attention.base import SequenceSlice
from llmservice_server.attention.triton_backend import TritonAttention
from llmservice_server.engine import startup
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.engine.startup import Started


def checkpoint(stand: Stand) -> Findings:
    """Written where it is not there already."""
    started_s = time.perf_counter()
    stand.checkpoint()
    return Findings(rows=[{"part": "checkpoint", "s": time.perf_counter() - started_s}])


def readiness(stand: Stand) -> Findings:
    """From nothing to a first token, beside what reading the weights takes; the blocks, beside the plan's."""
    stand.clear()
    reading_s = llama.read_seconds(stand.checkpoint())
    started_s = time.perf_counter()
    phases_s: dict[str, float] = {}

    def start_and_tell(config: EngineConfig) -> Started:
        started = startup.start(config)
        phases_s.update(started.phases_s)
        return started

    engine = stand.start(start_and_tell)
    add(engine, "first", any_prompt(8), 1)
    run_to_the_end(engine)
    ready_s = time.perf_counter() - started_s
    stand.keep(engine)
    ready = engine.ready
    found = _blocks(stand, engine)
    found.rows[:0] = [
        {"part": "start", "reading s": reading_s, "ready s": ready_s, "engine's own count s": ready.load_s},
        {"part": "start by phase", **{f"{phase} s": taken_s for phase, taken_s in phases_s.items()}},
    ]
    found.checks += [
        Check("ready beyond reading the weights", "<= 30", ready_s - reading_s, "s"),
        Check("attention by our kernels", "= 1", isinstance(engine.runner.attention, TritonAttention)),
        Check("decode steps as CUDA graphs", "= 1", engine.runner.decode_path is not None),
    ]
    return found


def _blocks(stand: Stand, engine: Engine) -> Findings:
    ready, sizes = engine.ready, stand.sizes
    predicted = plan(
        SizingRequest(
            shape=ModelShape.from_config(read_config(stand.checkpoint())),
            device=stand.card.for_the_plan(),
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
        )
    )
    off_by = abs(predicted.num_blocks - ready.num_blocks) / ready.num_blocks
    gib = {f"{kind} GiB": number / 2**30 for kind, number in ready.memory_bytes.items()}
    return Findings(
        rows=[{"part": "memory", "blocks": ready.num_blocks, "planned blocks": predicted.num_blocks, **gib}],
        checks=[Check("planned KV blocks differ from measured (relative)", "<= 0.03", off_by)],
    )


def steps(stand: Stand) -> Findings:
    """Decode steps in bytes read, prefill steps in FLOPs, without sampling; each launched while one before it runs."""
    for cache in stand.engine().runner.attention.caches:
        cache.normal_()  # what memory happens to hold may be no number, and zeros draw less of a card's power
    found = _decode(stand, stand.engine())
    found.add(_prefill(stand, stand.engine()))
    return found


def _decode(stand: Stand, engine: Engine) -> Findings:
    found, shares = Findings(), []
    runner, block_size, context = engine.runner, engine.ready.block_size, stand.sizes.context
    weight_bytes = engine.ready.memory_bytes["weights"]
    kv_bytes_per_token = engine.ready.memory_bytes["kv_cache"] / (engine.ready.num_blocks + 1) / block_size
    blocks_each = -(-context // block_size)
    for batch in stand.sizes.decode_batches:
        if batch * blocks_each > engine.ready.num_blocks:
            found.notes.append(f"the card has no room for {batch} sequences of {context} tokens")
            continue
        slices = [
            SequenceSlice(context - 1, 1, range(1 + place * blocks_each, 1 + (place + 1) * blocks_each))
            for place in range(batch)
        ]
        tokens, positions = np.zeros(batch, np.int64), np.full(batch, context - 1, np.int64)

        def step(tokens=tokens, positions=positions, slices=slices) -> None:  # type: ignore[no-untyped-def]
            with torch.inference_mode():
                runner.model.logits(runner._forward(tokens, positions, slices))

        p50_s, p99_s = np.percentile(stand.card.laps(step, stand.sizes.step_repetitions), (50, 99)).tolist()
        embedding_bytes = runner.model.embed_tokens.nbytes  # of which a step reads a row a sequence
        read = weight_bytes - embedding_bytes + batch * context * kv_bytes_per_token
        shares.append(read / p50_s / stand.ceilings.copy_bytes_per_s)
        found.rows.append({
            "part": "decode step", "batch": batch, "context": context, "tokens/s": batch / p50_s,
            "ITL p50 ms": p50_s * 1e3, "ITL p99 ms": p99_s * 1e3, "share of copy bandwidth": shares[-1],
        })  # fmt: skip
    what = f"decode at batch 1-{max(stand.sizes.decode_batches)}, {context} tokens each: least share of copy bandwidth"
    found.checks.append(Check(what, ">= 0.75", min(shares, default=0.0)))
    return found


def _prefill(stand: Stand, engine: Engine) -> Findings:
    found = Findings()
    runner, config = engine.runner, engine.runner.model.config
    parameters = engine.ready.memory_bytes["weights"] / runner.model.dtype.itemsize
    parameters -= 2 * config.vocab_size * config.hidden_size  # one row is looked up, one goes through the head
    for length in stand.sizes.step_prompts:

        def step(length: int = length) -> None:
            runner.dummy_step(length, 1, length, engine.ready.block_size)

        taken_s = seconds(stand.card, step)
        attention = config.num_layers * 4 * config.num_heads * config.head_dim * length * (length + 1) / 2
        share = (2 * parameters * length + attention) / taken_s / stand.ceilings.matmul_flops
        found.rows.append(
            {"part": "prefill step", "prompt": length, "TTFT ms": taken_s * 1e3, "of the matmul rate": share}
        )
        found.checks.append(Check(f"prefill of {length} tokens: share of the matmul rate", ">= 0.6", share))
    return found
