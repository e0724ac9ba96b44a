"""Compiles every kernel for a GPU that is not there, and prints what each takes of it: Triton needs a card only to run.

`python -m harness.compile_kernels [CAPABILITY [all]]` (90: Hopper) writes a JSON line for each kernel and shape: Llama
3 8B's, or all of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

from llmservice_server.attention.base import KVCacheShape, Rotation, SequenceSlice
from llmservice_server.attention.triton_backend import TritonAttention
from llmservice_server.kernels.activation import silu_mul
from llmservice_server.kernels.heaviest import heaviest
from llmservice_server.kernels.jit import FP8
from llmservice_server.kernels.norm import add_rms_norm

HEADS, KV_HEADS, WIDTH = 8, 2, 256
STEPS = {
    "few decodes": [SequenceSlice(20, 1, [1, 2])],
    "many decodes": [SequenceSlice(20, 1, [1, 2])] * 400,
    "prompts": [SequenceSlice(0, 20, [1, 2])],
}


SHAPES = ((torch.bfloat16, torch.bfloat16, 128, 16), (torch.bfloat16, FP8, 128, 16))
OTHER_SHAPES = (
    (torch.bfloat16, torch.bfloat16, 64, 16),
    (torch.bfloat16, torch.bfloat16, 256, 256),
    (torch.float16, torch.float16, 96, 64),
    (torch.float32, torch.float32, 128, 16),
)
FP8_CAPABILITY = 89


class AbsentCard(CudaDriver):
    """What a kernel asks of the driver before it is launched."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compile_only(capability: int, told: Callable[[str, Any], None]) -> None:
    """From here on a launch compiles, tells of what it compiled, and launches nothing."""
    triton.runtime.driver.set_active(AbsentCard(capability))
    run = triton.runtime.jit.JITFunction.run

    def run_never(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        told(self.__name__, run(self, *args, grid=grid, warmup=True, **options))

    triton.runtime.jit.JITFunction.run = run_never


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of stack: what spills out of them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return {"registers": int(registers), "stack_bytes": int(stack)}


def launch_all(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    shape = KVCacheShape(HEADS, KV_HEADS, head_dim, (None,), block_size, cache_dtype)
    backend = TritonAttention(shape, 64, torch.device("cpu"))
    for slices in STEPS.values():
        num_tokens = sum(part.num_tokens for part in slices)
        heads = torch.zeros(num_tokens, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
        cos = torch.zeros(num_tokens, 1, head_dim, dtype=dtype)
        norm = torch.zeros(HEADS + KV_HEADS, head_dim, dtype=dtype)
        step = backend.prepare(slices)
        step(0, heads[:, :HEADS], heads[:, HEADS:])
        for qk_norm in (None, (norm, 1e-5)):
            step.rotate_and_attend(0, heads, Rotation(cos, cos, qk_norm))
    hidden = torch.zeros(4, 4096, dtype=dtype)
    for delta in (None, hidden):
        add_rms_norm(hidden, delta, hidden[0], 1e-5)
    silu_mul(hidden)
    for by_mass in (False, True):
        heaviest(torch.zeros(4, 128_256), torch.zeros(4, dtype=torch.float64), by_mass)


def main() -> None:
    capability = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    seen = set()
    context: dict[str, Any] = {}

    def told(name: str, kernel: Any) -> None:
        if kernel.hash in seen:
            return
        seen.add(kernel.hash)
        ptx = kernel.asm["ptx"]
        line = {
            "kernel": name,
            **context,
            "shared_bytes": kernel.metadata.shared,
            "num_warps": kernel.metadata.num_warps,
            "tensor_cores": "wgmma" in ptx or "mma.sync" in ptx,
            "asynchronous_copies": "cp.async" in ptx,
            **resources(kernel.asm["cubin"]),
        }
        print(json.dumps(line), flush=True)

    compile_only(capability, told)
    for dtype, cache_dtype, head_dim, block_size in SHAPES + (OTHER_SHAPES if sys.argv[2:] == ["all"] else ()):
        if cache_dtype == FP8 and capability < FP8_CAPABILITY:
            continue
        context = {"dtype": str(dtype), "cache_dtype": str(cache_dtype), "head_dim": head_dim, "block_size": block_size}
        launch_all(dtype, cache_dtype, head_dim, block_size)


if __name__ == "__main__":
    main()
