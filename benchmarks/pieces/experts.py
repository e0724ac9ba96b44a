"""The experts of a layer of Qwen3-30B-A3B on this CPU, beside what memory and arithmetic allow, and beside loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from llmservice_bench.profile.ceilings import Ceilings, seconds
from llmservice_server.backend.cpu.experts import CpuExperts
from llmservice_server.backend.cpu.int4 import Int4Linear
from llmservice_server.backend.cpu.int8 import Int8Linear
from llmservice_server.backend.cpu.layer_ops import CpuLayerOps
from llmservice_server.backend.cpu.linear import pack
from llmservice_server.backend.cpu.linear_kernels import HAS_QUAD_PRODUCT
from llmservice_server.backend.experts import AdaptedRows, Experts, LowRankExperts, stack_of
from llmservice_server.backend.layers import LayerOps, Linear
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.backend.torch.layer_ops import TorchLinear

NUM_TOKENS = (1, 8, 64, 512)
HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8
RANK = 16
"""Of an adapter that all tokens have, and that changes all experts."""
_ROUNDS, _MEASURED_S = 8, 5.0
"""At least."""
_COPIED_BYTES = 512 << 20  # much larger than the caches


class _Grouped(Experts):
    """By torch's product of groups, of unpacked weights."""

    def multiply(self, states: torch.Tensor, counts: torch.Tensor, ops: LayerOps, rows: AdaptedRows) -> torch.Tensor:
        assert len(rows) == 1  # noqa: S101 - without adapters
        ends = counts.flatten().cumsum(0).int()
        gate_up, down = stack_of(self.gate_up), stack_of(self.down)
        assert gate_up is not None  # noqa: S101
        assert down is not None  # noqa: S101
        gated = ops.gated(torch._grouped_mm(states, gate_up.transpose(1, 2), offs=ends), self.activation)
        return torch._grouped_mm(gated, down.transpose(1, 2), offs=ends)


@torch.inference_mode()
def measure_experts(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """A row for each number of tokens, whose experts are drawn evenly; the shortest of several runs of each.

    The bandwidth is that of copies in between, read and written bytes, because the speed of a shared machine varies.
    In 4 bits (integers in groups of 128, mxfp4, NVFP4) and, where the CPU has instructions, 8, also beside loops.
    """
    random, ops = torch.Generator().manual_seed(0), CpuLayerOps(threaded=True)
    gate_up = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype, generator=random) * HIDDEN**-0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, dtype=dtype, generator=random) * WIDTH**-0.5
    unpacked = _Grouped([TorchLinear(each) for each in gate_up], [TorchLinear(each) for each in down])
    loops = {"": Experts([*map(pack, unpacked.gate_up)], [*map(pack, unpacked.down)])}
    for name, quantize in _QUANTIZED.items():
        loops[f"{name}_"] = Experts([*map(quantize, unpacked.gate_up)], [*map(quantize, unpacked.down)])
    kinds = {name: kernel for name, loop in loops.items() if (kernel := CpuExperts.of(loop, dtype)) is not None}
    if len(kinds) < len(loops):
        return
    shapes = (2 * RANK, HIDDEN), (2 * WIDTH, 2 * RANK), (RANK, WIDTH), (HIDDEN, RANK)
    adapter = LowRankExperts.of(torch.randn(NUM_EXPERTS, *shape, dtype=dtype, generator=random) for shape in shapes)
    source = torch.ones(_COPIED_BYTES // 4)
    target, flops = torch.empty_like(source), Ceilings.measure(dtype).flops
    for num_tokens in NUM_TOKENS:
        hidden = torch.randn(num_tokens, HIDDEN, generator=random).to(dtype)
        weights, chosen = torch.rand(num_tokens, NUM_EXPERTS, generator=random).softmax(-1).topk(TOP_K)
        works: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
        several = {"grouped_mm": unpacked, **{f"{name}loop": loop for name, loop in loops.items()}}
        several |= {f"{name}experts": kernel for name, kernel in kinds.items()}
        for name, one in several.items():  # ours do not follow the copy, whose result is still being written
            works[name] = lambda one=one: one(hidden, chosen, weights, ops)  # type: ignore[misc]  # noqa: B023
        adapted = [(slice(num_tokens), adapter)]
        works["adapter"] = lambda: kinds[""].adapted(hidden, chosen, weights, ops, adapted)  # noqa: B023
        for work in works.values():
            work()
        rounds: list[list[float]] = []
        end_s = time.perf_counter() + _MEASURED_S
        while len(rounds) < _ROUNDS or time.perf_counter() < end_s:
            rounds.append([seconds(work) for work in works.values()])
        taken_s = dict(zip(works, map(min, zip(*rounds, strict=True)), strict=True))
        active = int(chosen.flatten().bincount().count_nonzero())
        weights_bytes = active * 3 * HIDDEN * WIDTH * dtype.itemsize
        read_s = weights_bytes / (2 * source.nbytes / taken_s.pop("copy"))
        compute_s = 2 * num_tokens * TOP_K * 3 * HIDDEN * WIDTH / flops
        yield {
            "tokens": num_tokens,
            "active_experts": active,
            **{f"{name}_ms": each * 1000 for name, each in taken_s.items()},
            "read_ms": read_s * 1000,
            "arithmetic_ms": compute_s * 1000,
            "adapter_of_experts": taken_s["adapter"] / taken_s["experts"],
            "of_reading": taken_s["experts"] / read_s,
            "of_the_longer": taken_s["experts"] / max(read_s, compute_s),
            **{f"{name}of_the_loop": taken_s[f"{name}experts"] / taken_s[f"{name}loop"] for name in kinds},
        }


def _int4(linear: Linear) -> Linear:
    outputs, inputs = linear.weight.shape
    numbers = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8)
    return Int4Linear.of(QuantizedWeight(numbers, torch.rand(outputs, inputs // 128).bfloat16(), group=128), None)


def _mxfp4(linear: Linear) -> Linear:
    outputs, inputs = linear.weight.shape
    numbers = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8)
    powers = torch.full((outputs, inputs // 32), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return Int4Linear.of(QuantizedWeight(numbers, powers, group=32), None)


def _nvfp4(linear: Linear) -> Linear:
    outputs, inputs = linear.weight.shape
    numbers = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8)
    scales, whole = torch.rand(outputs, inputs // 16).to(torch.float8_e4m3fn), torch.ones(outputs, 1).double()
    return Int4Linear.of(QuantizedWeight(numbers, scales, group=16, output_scales=whole), None)


def _int8(linear: Linear) -> Linear:
    return Int8Linear.of(QuantizedWeight.int8(linear.weight), None)


_QUANTIZED = {"int4": _int4, "mxfp4": _mxfp4, "nvfp4": _nvfp4, **({"int8": _int8} if HAS_QUAD_PRODUCT else {})}
