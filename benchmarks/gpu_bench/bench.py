"""The environment of every section: the GPU and its ceilings, the sizes, the checkpoint, and a shared engine."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_bench import llama
from gpu_bench.device import GPUDevice, seconds
from gpu_bench.sections import Findings
from gpu_bench.sizes import Sizes
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.runtime.startup import load_engine
from llmservice_server.types.messages import GenerateRequest, Output, SamplingParams


class Bench:
    """Measures the ceilings on construction.

    Starting an engine takes as long as most sections, so the one with default settings is shared until a section needs
    the whole GPU.
    """

    def __init__(self, gpu: GPUDevice, sizes: Sizes, folder: Path) -> None:
        self.gpu = gpu
        self.sizes = sizes
        self._folder = folder
        self.ceilings = measure_ceilings(gpu, sizes)
        self.output_tokens_per_s: float | None = None
        """Throughput of our engine at `sizes.in_flight`, if it was measured in this process."""
        self._engine: Engine | None = None

    def checkpoint(self) -> Path:
        """The checkpoint's folder, which is written if it does not exist."""
        llama.write(self._folder, self.sizes.config, self.gpu.device)
        return self._folder

    def config(self, **settings: Any) -> EngineConfig:
        return EngineConfig(
            model=self.checkpoint(),
            max_num_seqs=self.sizes.max_num_seqs,
            max_model_len=self.sizes.max_model_len,
            max_num_batched_tokens=self.sizes.max_num_batched_tokens,
            **{**self.gpu.settings, **settings},
        )

    def start(self, **settings: Any) -> Engine:
        """A new engine in the GPU's free memory."""
        return load_engine(self.config(**settings))

    def keep(self, engine: Engine) -> None:
        self._engine = engine

    def engine(self) -> Engine:
        """The shared engine, idle; started if there is none."""
        if self._engine is None:
            self._engine = self.start()
        return self._engine

    def clear(self) -> None:
        """Release the shared engine and its memory."""
        self._engine = None
        self.gpu.release()


def add(engine: Engine, name: str, prompt: list[int], output_tokens: int, **sampling: Any) -> None:
    """Add a request for exactly `output_tokens` (unless it has stop tokens); greedy unless `sampling` differs."""
    params = SamplingParams(**{"max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True} | sampling)
    engine.add(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=params, arrival_s=time.monotonic()))


def unique_prompt(num_tokens: int) -> list[int]:
    """A prompt; up to 500 lengths start with different tokens, so that they share no prefix."""
    return [(7 * place + num_tokens) % 500 for place in range(num_tokens)]


def run_until_idle(engine: Engine) -> list[Output]:
    """Step until the engine is idle; returns the outputs that finished a request."""
    finished = []
    while engine.has_work:
        finished += [output for output in engine.step().outputs if output.finish_reason is not None]
    return finished


def larger_error(one: float, other: float) -> float:
    """Infinite where one of them is NaN, which no comparison finds."""
    return math.inf if math.isnan(one + other) else max(one, other)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The GPU's measured peak rates, from the same process as the figures compared with them."""

    copy_bytes_per_s: float  # read and written, both counted
    matmul_flops: float  # in the model's dtype, with random numbers


def measure_ceilings(gpu: GPUDevice, sizes: Sizes) -> Ceilings:
    return Ceilings(_copy_bytes_per_s(gpu, sizes.copy_bytes), _matmul_flops(gpu, sizes.matrix, sizes.dtype))


def _copy_bytes_per_s(gpu: GPUDevice, num_bytes: int) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=gpu.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(gpu, lambda: target.copy_(source))


def _matmul_flops(gpu: GPUDevice, size: int, dtype: torch.dtype) -> float:
    left, right = (torch.randn(size, size, dtype=dtype, device=gpu.device) for _ in range(2))
    product = torch.empty_like(left)
    return 2.0 * size**3 / seconds(gpu, lambda: torch.mm(left, right, out=product), 10)


def ceilings(bench: Bench) -> Findings:
    """The ceilings measured when this process started."""
    copy, matmul = bench.ceilings.copy_bytes_per_s / 1e12, bench.ceilings.matmul_flops / 1e12
    return Findings(rows=[{"part": "ceilings", "copy TB/s": copy, "matmul TFLOP/s": matmul}])
