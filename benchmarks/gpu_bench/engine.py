"""The engine on the GPU: time until ready, memory, and the share of the ceilings that its steps reach."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch

from gpu_bench import llama
from gpu_bench.bench import Bench, add, run_until_idle, unique_prompt
from gpu_bench.device import host_seconds, seconds
from gpu_bench.sections import Findings
from llmservice_bench.results import Check
from llmservice_planner.model.config import read_config
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.plan import plan
from llmservice_planner.sizing.request import SizingRequest
from llmservice_server.backend.cuda.attention import TritonAttention
from llmservice_server.backend.step_input import StepInput
from llmservice_server.engine.engine import Engine
from llmservice_server.models.lora import SlotRows
from llmservice_server.runtime import startup
from llmservice_server.runtime.startup import model_runner

_MIXED_PROMPT, _MIXED_DECODES = 256, 64  # tokens, sequences
_NUM_ADAPTERS = 4


def checkpoint(bench: Bench) -> Findings:
    """The time to write the checkpoint, if it does not exist."""
    started_s = time.perf_counter()
    bench.checkpoint()
    return Findings(rows=[{"part": "checkpoint", "s": time.perf_counter() - started_s}])


def readiness(bench: Bench) -> Findings:
    """The time to the first token compared with reading the weights, and the KV blocks compared with the plan."""
    bench.clear()
    reading_s = llama.read_seconds(bench.checkpoint())
    started_s = time.perf_counter()
    config = bench.config()
    started = startup.start(config)
    engine = Engine(config, started)
    add(engine, "first", unique_prompt(8), 1)
    run_until_idle(engine)
    ready_s = time.perf_counter() - started_s
    bench.keep(engine)
    ready = engine.ready
    found, runner = _blocks(bench, engine), model_runner(engine)
    found.rows[:0] = [
        {"part": "start", "reading s": reading_s, "ready s": ready_s, "engine load s": ready.load_s},
        {"part": "start by phase", **{f"{phase} s": taken_s for phase, taken_s in started.phases_s.items()}},
    ]
    found.checks += [
        Check("ready beyond reading the weights", "<= 30", ready_s - reading_s, "s"),
        Check("attention by our kernels", "= 1", isinstance(runner.attention, TritonAttention)),
        Check("decode steps as CUDA graphs", "= 1", runner.decode_path is not None),
    ]
    return found


def _blocks(bench: Bench, engine: Engine) -> Findings:
    ready, sizes = engine.ready, bench.sizes
    predicted = plan(
        SizingRequest(
            shape=ModelShape.from_config(read_config(bench.checkpoint())),
            device=bench.gpu.for_planner(),
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


def steps(bench: Bench) -> Findings:
    """Bandwidth of decode steps and FLOP/s of prefill steps, without sampling, launched without waiting."""
    for cache in model_runner(bench.engine()).attention.caches:
        cache.normal_()  # uninitialised memory may contain NaN, and zeros use less power
    found, shares = _decode(bench, bench.engine(), "decode step")
    what = f"decode at batch 1-{max(bench.sizes.decode_batches)}, {bench.sizes.context} tokens each"
    found.checks.append(Check(f"{what}: least share of copy bandwidth", ">= 0.75", min(shares, default=0.0)))
    found.add(_prefill(bench, bench.engine()))
    found.add(_mixed(bench, bench.engine()))
    return found


def by_transformers(bench: Bench) -> Findings:
    """Decode steps of the same checkpoint by transformers' code, captured as ours."""
    bench.clear()
    engine = bench.start(implementation="transformers")
    runner = model_runner(engine)
    for cache in runner.attention.caches:
        cache.normal_()
    found, _ = _decode(bench, engine, "decode step of transformers' code")
    found.checks.append(
        Check("decode steps of transformers' code as CUDA graphs", "= 1", runner.decode_path is not None)
    )
    return found


def with_adapters(bench: Bench) -> Findings:
    """Decode steps of the same checkpoint whose rows have four adapters of rank 16 in turn."""
    bench.clear()
    engine = bench.start(max_loras=_NUM_ADAPTERS, max_lora_rank=16)
    runner = model_runner(engine)
    assert runner.adapters is not None  # noqa: S101  # there are slots
    for cache in runner.attention.caches:
        cache.normal_()
    with torch.inference_mode(), runner.adapters.trial():
        found, _ = _decode(bench, engine, "decode step with adapters", num_adapters=_NUM_ADAPTERS)
    step = replace(StepInput.of([(0, 1, [1])]), adapter_slots=np.zeros(1, np.int64))
    are_graphs = runner.decode_path is not None and runner.decode_path.takes(step)
    found.checks.append(Check("decode steps with adapters as CUDA graphs", "= 1", are_graphs))
    return found


def _decode(bench: Bench, engine: Engine, part: str, num_adapters: int = 0) -> tuple[Findings, list[float]]:
    """Also the shares of the copy bandwidth."""
    found, shares = Findings(), []
    runner, block_size, context = model_runner(engine), engine.ready.block_size, bench.sizes.context
    weight_bytes = engine.ready.memory_bytes["weights"]
    kv_bytes_per_token = engine.ready.memory_bytes["kv_cache"] / (engine.ready.num_blocks + 1) / block_size
    blocks_each = -(-context // block_size)
    for batch in bench.sizes.decode_batches:
        if batch * blocks_each > engine.ready.num_blocks:
            found.notes.append(f"no memory for {batch} sequences of {context} tokens")
            continue
        decodes = StepInput.of(
            (context - 1, 1, range(1 + place * blocks_each, 1 + (place + 1) * blocks_each)) for place in range(batch)
        )

        rows = [SlotRows(place % num_adapters, slice(place, place + 1)) for place in range(batch) if num_adapters]

        def step(decodes: StepInput = decodes, rows: list[SlotRows] = rows) -> None:
            with torch.inference_mode():
                runner.model.logits(runner.forward(decodes, rows))

        p50_s, p99_s = np.percentile(bench.gpu.timings_s(step, bench.sizes.step_repetitions), (50, 99)).tolist()
        config = runner.model.config
        embedding_bytes = config.vocab_size * config.hidden_size * runner.model.dtype.itemsize  # one row a sequence
        read = weight_bytes - embedding_bytes + batch * context * kv_bytes_per_token
        shares.append(read / p50_s / bench.ceilings.copy_bytes_per_s)
        found.rows.append({
            "part": part, "batch": batch, "context": context, "tokens/s": batch / p50_s,
            "ITL p50 ms": p50_s * 1e3, "ITL p99 ms": p99_s * 1e3, "share of copy bandwidth": shares[-1],
            "host ms": host_seconds(bench.gpu, step) * 1e3, "launches": bench.gpu.launches(step),
        })  # fmt: skip
    return found, shares


def _mixed(bench: Bench, engine: Engine) -> Findings:
    """A prompt's chunk beside decodes, as under steady arrivals: bounded by the host's launches in small models."""
    runner, block_size, sizes = model_runner(engine), engine.ready.block_size, bench.sizes
    prompt, num_decodes = min(_MIXED_PROMPT, sizes.max_model_len), min(_MIXED_DECODES, sizes.max_num_seqs - 1)
    first = 1 + -(-prompt // block_size)
    runs = [(0, prompt, range(1, first)), *((0, 1, [first + place]) for place in range(num_decodes))]
    step = StepInput.of(runs)

    def launch() -> None:
        with torch.inference_mode():
            runner.forward(step)

    launches = bench.gpu.launches(launch)
    row = {
        "part": "mixed step", "prompt": prompt, "decodes": num_decodes, "ms": seconds(bench.gpu, launch) * 1e3,
        "host ms": host_seconds(bench.gpu, launch) * 1e3, "launches": launches,
    }  # fmt: skip
    most = 6 * len(runner.model.config.windows) + 20
    return Findings(rows=[row], checks=[Check("launches of a mixed step", f"<= {most}", launches)])


def _prefill(bench: Bench, engine: Engine) -> Findings:
    found, runner = Findings(), model_runner(engine)
    config = runner.model.config
    parameters = engine.ready.memory_bytes["weights"] / runner.model.dtype.itemsize
    parameters -= 2 * config.vocab_size * config.hidden_size  # embedding and head process one row per sequence
    for length in bench.sizes.step_prompts:

        def step(length: int = length) -> None:
            runner.dummy_step(length, 1, length, engine.ready.block_size)

        taken_s = seconds(bench.gpu, step)
        attention = len(config.windows) * 4 * config.num_heads * config.head_dim * length * (length + 1) / 2
        share = (2 * parameters * length + attention) / taken_s / bench.ceilings.matmul_flops
        found.rows.append(
            {"part": "prefill step", "prompt": length, "TTFT ms": taken_s * 1e3, "of the matmul rate": share}
        )
        found.checks.append(Check(f"prefill of {length} tokens: share of the matmul rate", ">= 0.6", share))
    return found
