"""The experts of a layer of Qwen3-30B-A3B on this CPU, beside what memory and arithmetic allow, and beside loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from llmservice_bench.profile.ceilings import Ceilings, seconds
from llmservice_server.backend.cpu.experts import CpuExperts
from llmservice_server.backend.cpu.layer_ops import CpuLayerOps
from llmservice_server.backend.cpu.linear import pack
from llmservice_server.backend.experts import Experts, stack_of
from llmservice_server.backend.torch.layer_ops import TorchLinear

NUM_TOKENS = (1, 8, 64, 512)
HIDDEN, WIDTH, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8
_ROUNDS = 8
_COPIED_BYTES = 512 << 20  # much larger than the caches


class _Grouped(Experts):
    """By torch's product of groups, of unpacked weights."""

    def multiply(self, rows: torch.Tensor, counts: torch.Tensor, ops: Any) -> torch.Tensor:
        ends = counts.cumsum(0).int()
        gate_up, down = stack_of(self.gate_up), stack_of(self.down)
        assert gate_up is not None  # noqa: S101
        assert down is not None  # noqa: S101
        gated = ops.gated(torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends), self.activation)
        return torch._grouped_mm(gated, down.transpose(1, 2), offs=ends)


@torch.inference_mode()
def measure_experts(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """A row for each number of tokens, whose experts are drawn evenly; the shortest of several runs of each.

    The bandwidth is that of copies in between, read and written bytes, because the speed of a shared machine varies.
    """
    random, ops = torch.Generator().manual_seed(0), CpuLayerOps(threaded=True)
    gate_up = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype, generator=random) * HIDDEN**-0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, dtype=dtype, generator=random) * WIDTH**-0.5
    unpacked = _Grouped([TorchLinear(each) for each in gate_up], [TorchLinear(each) for each in down])
    loop = Experts([pack(linear) for linear in unpacked.gate_up], [pack(linear) for linear in unpacked.down])
    experts = CpuExperts.of(loop, dtype)
    if experts is None:
        return
    source = torch.ones(_COPIED_BYTES // 4)
    target, flops = torch.empty_like(source), Ceilings.measure(dtype).flops
    for num_tokens in NUM_TOKENS:
        hidden = torch.randn(num_tokens, HIDDEN, generator=random).to(dtype)
        weights, chosen = torch.rand(num_tokens, NUM_EXPERTS, generator=random).softmax(-1).topk(TOP_K)
        works: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
        for name, one in (("experts", experts), ("loop", loop), ("grouped_mm", unpacked)):
            works[name] = lambda one=one: one(hidden, chosen, weights, ops)  # type: ignore[misc]  # noqa: B023
        for work in works.values():
            work()
        rounds = [[seconds(work) for work in works.values()] for _ in range(_ROUNDS)]
        copy_s, experts_s, loop_s, grouped_s = map(min, zip(*rounds, strict=True))
        active = int(chosen.flatten().bincount().count_nonzero())
        weights_bytes = active * 3 * HIDDEN * WIDTH * dtype.itemsize
        read_s = weights_bytes / (2 * source.nbytes / copy_s)
        compute_s = 2 * num_tokens * TOP_K * 3 * HIDDEN * WIDTH / flops
        yield {
            "tokens": num_tokens,
            "active_experts": active,
            "experts_ms": experts_s * 1000,
            "loop_ms": loop_s * 1000,
            "grouped_mm_ms": grouped_s * 1000,
            "read_ms": read_s * 1000,
            "arithmetic_ms": compute_s * 1000,
            "of_reading": experts_s / read_s,
            "of_the_longer": experts_s / max(read_s, compute_s),
            "of_the_loop": experts_s / loop_s,
        }
