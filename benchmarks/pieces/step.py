"""The host's time per step, with a model that computes nothing, and the time of a step of a real model."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from statistics import median

import msgspec
import torch

from llmservice_bench.models import SHAPES, checkpoint
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.runtime.startup import load_engine
from llmservice_server.types.messages import GenerateRequest, SamplingParams
from pieces.empty_engine import EmptyModel, empty_engine
from pieces.timing import Timing

PROMPT_TOKENS = 256
VOCAB = 64  # small, to measure sampling per sequence; the sampler is measured separately


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a step in which every running sequence decodes one token."""

    host: Timing  # schedule, inputs, block tables, sample, update, encode; without the model
    cpu_p50_s: float  # CPU time of the step including the model, which other processes do not affect
    model_p50_s: float
    message_bytes: int


def measure_step(num_running: int, temperature: float, steps: int = 200) -> StepCost:
    """Decode `num_running` sequences, each with a context of at least `PROMPT_TOKENS`.

    In one thread, because such small operations only wait for a second one.
    """
    torch.set_num_threads(1)
    model = EmptyModel(VOCAB, list(range(VOCAB)), period_s=0.0)
    sampling = SamplingParams(max_tokens=2 * steps, temperature=temperature)  # the first sequences start earlier
    engine = empty_engine(model, num_running, PROMPT_TOKENS + sampling.max_tokens)
    for number in range(num_running):
        prompt = [(number + place) % VOCAB for place in range(PROMPT_TOKENS)]
        request_id = f"{number:032x}-0"  # as long as those of the HTTP process
        arrival_s = time.monotonic()
        engine.add(
            GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, arrival_s=arrival_s)
        )
    decode_together(engine, num_running)
    encoder = msgspec.msgpack.Encoder()
    gc.collect()
    gc.freeze()  # as the engine process does after loading
    host, own, cpu = [], [], []
    message = b""
    for _ in range(steps):
        before_s, busy_s, started_s = model.spent_s, time.thread_time(), time.perf_counter()
        message = encoder.encode(engine.step())
        took_s = time.perf_counter() - started_s
        cpu.append(time.thread_time() - busy_s)
        own.append(model.spent_s - before_s)
        host.append(took_s - own[-1])
    gc.unfreeze()
    if len(engine.last_plan.scheduled) < num_running:
        raise ValueError(f"some of the {num_running} sequences had ended before the {steps} steps were over")
    return StepCost(Timing.of(host), Timing.of(cpu).p50_s, Timing.of(own).p50_s, len(message))


def decode_together(engine: Engine, num_running: int) -> None:
    """Step until each of the `num_running` requests of the engine decodes.

    Raises ValueError if one of them ends before.
    """
    while len(engine.last_plan.scheduled) < num_running or engine.last_plan.num_tokens > num_running:
        for output in engine.step().outputs:
            if output.finish_reason is not None:
                why = output.error or output.finish_reason
                raise ValueError(
                    f"request {output.request_id} ended before all {num_running} decoded ({why}): "
                    "let it have more tokens, and the engine room for them"
                )


_PROMPT_TOKENS = 8  # short, so that the host's share of the step is large


def decoding_engine(model: str, num_running: int, max_tokens: int) -> Engine:
    """An engine in which that many requests with short prompts decode. Raises ValueError if one of them has ended."""
    engine = load_engine(EngineConfig(model=checkpoint(model), max_num_seqs=num_running, kv_cache_memory_bytes=1 << 29))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for number in range(num_running):
        prompt = [(number * place) % SHAPES[model].vocab_size for place in range(_PROMPT_TOKENS)]
        engine.add(GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0))
    decode_together(engine, num_running)
    return engine


def measure_real_step(model: str, num_running: int, steps: int = 5) -> float:
    """The median seconds of a step of `model` in which `num_running` sequences decode."""
    engine = decoding_engine(model, num_running, 2 * steps)
    seconds = []
    for _ in range(steps):
        started_s = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started_s)
    return median(seconds)
