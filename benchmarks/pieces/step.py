"""What a step costs on the host: everything that the engine does around a model that computes nothing."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import msgspec
import torch

from llmservice_server.messages import Generate, SamplingParams
from pieces.decoding import decode_together
from pieces.empty_engine import EmptyModel, empty_engine
from pieces.timing import Timing

PROMPT_TOKENS = 256
VOCAB = 64  # so that sampling is what it costs per sequence, not per logit: the sampler has figures of its own


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of a step in which every running sequence decodes one token."""

    num_running: int
    host: Timing  # schedule, inputs, block tables, sample, update, encode: without what the model's own calls take
    cpu_p50_s: float  # the processor's time of all that, the model's included: less than it took where others ran too
    model_p50_s: float
    message_bytes: int


def measure_step(num_running: int, temperature: float, steps: int = 200) -> StepCost:
    """Decode with `num_running` sequences at once, each with a context of `PROMPT_TOKENS` and more.

    In one thread: it is Python that is measured, and products this small only wait for a second thread.
    """
    torch.set_num_threads(1)
    model = EmptyModel(VOCAB, list(range(VOCAB)), period_s=0.0)
    sampling = SamplingParams(max_tokens=2 * steps, temperature=temperature)  # the first have a head start
    engine = empty_engine(model, num_running, PROMPT_TOKENS + sampling.max_tokens)
    for number in range(num_running):
        prompt = [(number + place) % VOCAB for place in range(PROMPT_TOKENS)]
        request_id = f"{number:032x}-0"  # as long as the HTTP process makes them
        arrival_s = time.monotonic()
        engine.add(Generate(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, arrival_s=arrival_s))
    decode_together(engine, num_running)
    encoder = msgspec.msgpack.Encoder()
    gc.collect()
    gc.freeze()  # as the engine process does once it is loaded
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
    return StepCost(num_running, Timing.of(host), Timing.of(cpu).p50_s, Timing.of(own).p50_s, len(message))
