"""Compiles every kernel for a GPU that is not there, and prints what each takes of it: Triton needs a GPU only to run.

`python -m harness.gpu.compile_kernels [CAPABILITY [one | all]]` (90: Hopper) prints a row of a table for each kernel
and shape: those that are most used, one of them, or all that the kernels are made for. `--json` prints a line of JSON
for each instead, where only the loops of kernels that use a stack are read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

from harness.gpu.kernel_resources import KernelResources
from llmservice_server.backend.base import Rotation
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda.attention import TritonAttention
from llmservice_server.backend.cuda.kernels.conversions import dequantized, round_rows
from llmservice_server.backend.cuda.kernels.jit import FP8
from llmservice_server.backend.cuda.kernels.layer_ops import add_rms_norm, silu_mul
from llmservice_server.backend.cuda.kernels.one_token import experts_of_one_token
from llmservice_server.backend.cuda.kernels.products import Tiled, grouped_product, quantized_product
from llmservice_server.backend.cuda.kernels.routing import combine, route
from llmservice_server.backend.cuda.kernels.sampling import invert, top_k_top_p
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.backend.step_input import StepInput

KV_HEADS = 2
VOCAB_SIZE = 151_936  # Qwen 3
FP8_CAPABILITY = 89
STEPS = {
    "few decodes": StepInput.of([(300, 1, [1] * 19)]),  # in parts
    "many decodes": StepInput.of([(20, 1, [1, 2])] * 400),
    "prompts": StepInput.of([(0, 20, [1, 2])]),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled anew for."""

    dtype: torch.dtype
    cache_dtype: torch.dtype
    head_dim: int
    block_size: int
    group: int  # query heads that share a key head
    softcap: float | None = None
    has_sinks: bool = False

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.").removesuffix("fn") for dtype in (self.dtype, self.cache_dtype)]
        dtypes = names[0] if self.dtype == self.cache_dtype else f"{names[0]}, {names[1]} cache"
        others = f"{', bounded scores' if self.softcap else ''}{', sinks' if self.has_sinks else ''}"
        return f"{dtypes}, heads of {self.head_dim}, {self.group} a key head, blocks of {self.block_size}{others}"


SHAPES = (
    Shape(torch.bfloat16, torch.bfloat16, 128, 16, 4),  # Llama 3 8B
    Shape(torch.bfloat16, FP8, 128, 16, 4),
    Shape(torch.bfloat16, torch.bfloat16, 256, 16, 8),
    Shape(torch.bfloat16, torch.bfloat16, 512, 16, 8),  # Gemma 4: the most registers
    Shape(torch.bfloat16, torch.bfloat16, 64, 16, 8, has_sinks=True),  # gpt-oss
    Shape(torch.bfloat16, torch.bfloat16, 256, 16, 2, softcap=50.0),  # Gemma 2
)
ONE_SHAPE = SHAPES[1:2]
OTHER_SHAPES = (
    Shape(torch.bfloat16, torch.bfloat16, 64, 16, 7),
    Shape(torch.bfloat16, torch.bfloat16, 128, 256, 8),
    Shape(torch.bfloat16, FP8, 64, 16, 8),
    Shape(torch.bfloat16, FP8, 256, 64, 4),
    Shape(torch.float16, torch.float16, 96, 64, 1),
    Shape(torch.float16, FP8, 128, 16, 1),
    Shape(torch.float32, torch.float32, 128, 16, 4),
    Shape(torch.float32, torch.float32, 256, 16, 1),
)
COLUMNS = {
    "registers": "registers",
    "stack_bytes": "stack, bytes",
    "shared_bytes": "shared, KiB",
    "num_warps": "warps",
    "tensor_cores": "tensor cores",
    "load_bytes": "widest load, bytes",
    "copy_bytes": "widest copy, bytes",
    "loop_instructions": "instructions a turn",
    "loop_spills": "of them spills",
}


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


def compile_only(capability: int, reported: Callable[[str, Any], None]) -> None:
    """From here on a launch compiles, tells of what it compiled, and launches nothing."""
    triton.runtime.driver.set_active(AbsentCard(capability))
    run = triton.runtime.jit.JITFunction.run

    def run_never(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        reported(self.__name__, run(self, *args, grid=grid, warmup=True, **options))

    triton.runtime.jit.JITFunction.run = run_never


def launch_all(shape: Shape, *, has_fp8: bool) -> None:
    heads = shape.group * KV_HEADS
    cache = KVCacheShape(
        heads, KV_HEADS, shape.head_dim, (None,), shape.block_size, shape.cache_dtype, shape.softcap, shape.has_sinks
    )
    sinks = torch.zeros(heads, dtype=shape.dtype) if shape.has_sinks else None
    backend = TritonAttention(cache, 64, torch.device("cpu"))
    for given in STEPS.values():
        num_tokens = len(given.token_ids)
        fused = torch.zeros(num_tokens, heads + 2 * KV_HEADS, shape.head_dim, dtype=shape.dtype)
        cos = torch.zeros(num_tokens, 1, shape.head_dim, dtype=shape.dtype)
        norm = torch.zeros(heads + KV_HEADS, shape.head_dim, dtype=shape.dtype)
        step = backend.prepare(given)
        step(0, fused[:, :heads], fused[:, heads:], sinks)
        for qk_norm in (None, (norm, 1e-5)):
            step.rotate_and_attend(0, fused, Rotation(cos, cos, qk_norm), sinks)
    hidden = torch.zeros(4, 4096, dtype=shape.dtype)
    for delta in (None, hidden):
        add_rms_norm(hidden, delta, hidden[0], 1e-5)
    silu_mul(hidden)
    four_bits = torch.zeros(256, 2048, dtype=torch.uint8)
    eight_bits = torch.zeros(256, 4096, dtype=FP8 if has_fp8 else torch.int8)
    for values, group, dtype in (
        (four_bits, 128, torch.bfloat16),
        (four_bits, 32, torch.float8_e8m0fnu),
        (four_bits, 16, torch.float8_e4m3fn),
        (four_bits, 64, torch.float32),  # NF4
        (eight_bits, None, torch.bfloat16),
    ):
        scales = torch.zeros(256, 1 if group is None else 4096 // group, dtype=torch.uint8).to(dtype)
        by_output = torch.zeros(256, 1, dtype=torch.float64) if group == 16 else None
        table = torch.zeros(16) if group == 64 else None
        weight = Tiled.of([QuantizedWeight(values, scales, group=group, output_scales=by_output, table=table)])
        quantized_product(hidden.to(torch.bfloat16), weight, None)
        dequantized(weight, torch.bfloat16)
    if has_fp8:
        round_rows(hidden, None)
    experts = Tiled.dense(torch.zeros(4, 512, 512, dtype=shape.dtype))
    for num_tokens in (4, 600):
        tokens, weights = torch.zeros(num_tokens, 512, dtype=shape.dtype), torch.zeros(num_tokens, 2)
        routing = route(weights.long(), 4, 16 if num_tokens == 4 else 64)
        products = grouped_product(tokens, routing, experts, None, of_tokens=True)
        combine(products, routing, weights)
    chosen, down = weights[:1].long(), torch.zeros(4, 512, 256, dtype=shape.dtype)
    experts_of_one_token(tokens[:1], chosen, weights[:1], experts.values, down)
    for num_rows in (1, 4, 300):
        weights, numbers = torch.zeros(num_rows, VOCAB_SIZE), torch.zeros(num_rows, dtype=torch.float64)
        for by_mass in (False, True):
            top_k_top_p(weights, numbers, by_mass)
        invert(weights, numbers)


def compile_all(
    capability: int, shapes: tuple[Shape, ...], *, every_loop: bool
) -> Iterator[tuple[str, Shape, KernelResources]]:
    """Each kernel once for each shape that makes another of it. To be called once in a process."""
    seen = set()
    compiled: list[tuple[str, Any]] = []

    def reported(name: str, kernel: Any) -> None:
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            compiled.append((name, kernel))

    compile_only(capability, reported)
    for shape in shapes:
        if shape.cache_dtype == FP8 and capability < FP8_CAPABILITY:
            continue
        launch_all(shape, has_fp8=capability >= FP8_CAPABILITY)
        for name, kernel in compiled:
            yield name, shape, KernelResources.of(kernel, every_loop=every_loop)
        compiled.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", type=int, nargs="?", default=90)
    parser.add_argument("shapes", choices=("one", "usual", "all"), nargs="?", default="usual")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print("| kernel | shape |", " | ".join(COLUMNS.values()), "|")
        print("| --- | --- |" + " --- |" * len(COLUMNS))
    shapes = {"one": ONE_SHAPE, "usual": SHAPES, "all": SHAPES + OTHER_SHAPES}[args.shapes]
    for name, shape, resources in compile_all(args.capability, shapes, every_loop=not args.json):
        figures = asdict(resources)
        if args.json:
            print(json.dumps({"kernel": name, "shape": str(shape), "dtype": str(shape.dtype), **figures}), flush=True)
        else:
            figures["shared_bytes"] //= 1024
            print(f"| `{name}` | {shape} |", " | ".join(str(figures[key]) for key in COLUMNS), "|", flush=True)


if __name__ == "__main__":
    main()
