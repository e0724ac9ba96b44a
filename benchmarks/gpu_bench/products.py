"""Products with quantised weights, compared with bfloat16, and with the experts of a mixture, compared with reading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from gpu_bench.bench import Bench, larger_error
from gpu_bench.device import seconds
from gpu_bench.sections import Findings
from llmservice_bench.results import Check
from llmservice_server.backend.cuda.backend import TritonLayerOps
from llmservice_server.backend.cuda.experts import CudaExperts
from llmservice_server.backend.cuda.kernels.jit import FP8, FP8_MAX
from llmservice_server.backend.cuda.linear import CudaQuantizedLinear
from llmservice_server.backend.experts import AdaptedRows, Experts, stack_of
from llmservice_server.backend.layers import LayerOps
from llmservice_server.backend.quantized import QuantizedLinear, QuantizedWeight
from llmservice_server.backend.torch.layer_ops import TorchLinear

_BOUND = 2e-2
_FLOAT4_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between two numbers of 4 bits."""
_DRAWS = 4
"""Of experts, so that those of a few tokens are not in the L2 cache."""


def _int4(weight: torch.Tensor) -> QuantizedWeight:
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, -1, 128)
    scales = groups.abs().amax(-1, keepdim=True) / 7
    values = ((groups / scales).round() + 8).clamp_(0, 15).view(outputs, inputs).to(torch.uint8)
    return QuantizedWeight(values[:, ::2] | (values[:, 1::2] << 4), scales.squeeze(-1).bfloat16(), group=128)


def _int8(weight: torch.Tensor) -> QuantizedWeight:
    made = QuantizedWeight.int8(weight)
    return QuantizedWeight(made.values, made.scales.bfloat16())


def _fp8(weight: torch.Tensor) -> QuantizedWeight:
    scales = weight.float().abs().amax(1, keepdim=True) / FP8_MAX
    return QuantizedWeight((weight.float() / scales).to(FP8), scales, activations="fp8")


def _fp8_blocks(weight: torch.Tensor) -> QuantizedWeight:
    outputs, inputs = weight.shape
    blocks = weight.float().view(outputs // 128, 128, inputs // 128, 128)
    scales = blocks.abs().amax((1, 3), keepdim=True) / FP8_MAX
    values = (blocks / scales).view(outputs, inputs).to(FP8)
    return QuantizedWeight(values, scales[:, 0, :, 0], rows=128, group=128, activations="fp8")


def _mxfp4(weight: torch.Tensor) -> QuantizedWeight:
    """The nearest numbers, with the largest of a group between 4 and 8 times its scale."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // 32, 32)
    powers = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    scales = (powers.squeeze(-1) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return QuantizedWeight(_float4(groups / powers.exp2()), scales, group=32)


def _nvfp4(weight: torch.Tensor) -> QuantizedWeight:
    """With the largest of all numbers 6 times the largest scale."""
    outputs, inputs = weight.shape
    groups, whole = weight.float().view(outputs, inputs // 16, 16), weight.float().abs().max() / 6 / FP8_MAX
    scales = (groups.abs().amax(-1) / 6 / whole).to(FP8)
    numbers = _float4(groups / (scales.float() * whole)[..., None])
    return QuantizedWeight(numbers, scales, group=16, output_scales=whole.double().expand(outputs, 1).contiguous())


def _nf4(weight: torch.Tensor) -> QuantizedWeight:
    """With a table of even steps, which takes as long as NF4's."""
    outputs, inputs = weight.shape
    groups, table = weight.float().view(outputs, inputs // 64, 64), torch.linspace(-1, 1, 16, device=weight.device)
    scales = groups.abs().amax(-1)
    places = ((groups / scales[..., None] + 1) * 7.5).round().flatten(1).to(torch.uint8)
    return QuantizedWeight(places[:, ::2] | (places[:, 1::2] << 4), scales, group=64, table=table)


def _float4(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of 4 bits, two in a byte `[out, in / 2]`, of `[out, groups, group]`."""
    sizes = torch.bucketize(scaled.abs(), torch.tensor(_FLOAT4_BOUNDS, device=scaled.device))
    numbers = (sizes + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    return numbers[:, ::2] | (numbers[:, 1::2] << 4)


FORMATS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "W4A16, groups of 128": _int4,
    "W8A16 int8": _int8,
    "W8A8 fp8": _fp8,
    "fp8 blocks": _fp8_blocks,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "nf4": _nf4,
}


@torch.inference_mode()
def quantized(bench: Bench) -> Findings:
    """Device time of a product of each format and number of rows, with weights that are not in the L2 cache."""
    gpu, sizes, found = bench.gpu, bench.sizes, Findings()
    worst = dict.fromkeys(FORMATS, 0.0)
    for outputs, inputs in sizes.products:
        dense = torch.randn(outputs, inputs, device=gpu.device, dtype=torch.bfloat16) * inputs**-0.5
        weights = {name: make(dense) for name, make in FORMATS.items()}
        for rows in sizes.product_rows:
            hidden = torch.randn(rows, inputs, device=gpu.device, dtype=torch.bfloat16)
            dense_copies = [dense.clone() for _ in range(max(1, -(-sizes.cold_bytes // dense.nbytes)))]
            dense_s = gpu.device_s(lambda: [F.linear(hidden, each) for each in dense_copies]) / len(dense_copies)  # noqa: B023
            for name, weight in weights.items():
                product = CudaQuantizedLinear.of(QuantizedLinear(weight, hidden.dtype))
                exact = weight if product.rounds else replace(weight, activations=None)
                expected = QuantizedLinear(exact, hidden.dtype)(hidden).float()
                error = float((product(hidden).float() - expected).norm() / expected.norm())
                worst[name] = larger_error(worst[name], error)
                count = max(1, -(-sizes.cold_bytes // weight.nbytes))
                copies = [replace(weight, values=weight.values.clone()) for _ in range(count)]
                linears = [CudaQuantizedLinear.of(QuantizedLinear(each, hidden.dtype)) for each in copies]
                taken_s = gpu.device_s(lambda: [each(hidden) for each in linears]) / count  # noqa: B023
                found.rows.append({
                    "part": "product", "format": name, "outputs": outputs, "inputs": inputs, "rows": rows,
                    "us": taken_s * 1e6, "bfloat16 us": dense_s * 1e6, "of bfloat16": taken_s / dense_s,
                    "share of copy bandwidth": weight.nbytes / taken_s / bench.ceilings.copy_bytes_per_s,
                })  # fmt: skip
    found.checks += [
        Check(f"{name} differs from torch's (relative)", f"<= {_BOUND}", error) for name, error in worst.items()
    ]
    return found


class _ByTorch(Experts):
    """By torch's product of groups."""

    def multiply(self, states: torch.Tensor, counts: torch.Tensor, ops: LayerOps, rows: AdaptedRows) -> torch.Tensor:
        assert len(rows) == 1  # noqa: S101 - without adapters
        ends, (gate_up, down) = counts.flatten().cumsum(0).int(), (stack_of(self.gate_up), stack_of(self.down))
        assert gate_up is not None  # noqa: S101
        assert down is not None  # noqa: S101
        gated = ops.gated(torch._grouped_mm(states, gate_up.mT, offs=ends), self.activation)
        return torch._grouped_mm(gated, down.mT, offs=ends)


@torch.inference_mode()
def experts(bench: Bench) -> Findings:
    """Time of a layer's experts, by our product of all of them, by torch's, and by a loop over them."""
    gpu, sizes, found, ops = bench.gpu, bench.sizes, Findings(), TritonLayerOps()
    count, top_k, hidden_size, width = sizes.experts
    dtype = bench.sizes.dtype
    gate_up = torch.randn(count, 2 * width, hidden_size, device=gpu.device, dtype=dtype) * hidden_size**-0.5
    down = torch.randn(count, hidden_size, width, device=gpu.device, dtype=dtype) * width**-0.5
    loop = Experts([TorchLinear(each) for each in gate_up], [TorchLinear(each) for each in down])
    ours = CudaExperts.of(loop)
    assert ours is not None  # noqa: S101
    by_torch = _ByTorch(loop.gate_up, loop.down)
    quantized_loop = Experts(
        [QuantizedLinear(_mxfp4(each), dtype) for each in gate_up],
        [QuantizedLinear(_mxfp4(each), dtype) for each in down],
    )
    of_4_bits = CudaExperts.of(quantized_loop)
    assert of_4_bits is not None  # noqa: S101
    for num_tokens in sizes.expert_tokens:
        hidden = torch.randn(num_tokens, hidden_size, device=gpu.device, dtype=dtype)
        draws = [torch.rand(num_tokens, count, device=gpu.device).softmax(-1).topk(top_k) for _ in range(_DRAWS)]

        def work(one: Experts) -> None:
            for weights, chosen in draws:  # noqa: B023
                one(hidden, chosen, weights, ops)  # noqa: B023

        weights, chosen = draws[0]

        def error_of(one: Experts, reference: Experts) -> float:
            expected = reference(hidden, chosen, weights, ops).float()  # noqa: B023
            return float((one(hidden, chosen, weights, ops).float() - expected).norm() / expected.norm())  # noqa: B023

        error, error_4_bits = error_of(ours, loop), error_of(of_4_bits, quantized_loop)
        active = sum(len(torch.unique(chosen)) for _, chosen in draws) / _DRAWS
        read_s = active * 3 * hidden_size * width * dtype.itemsize / bench.ceilings.copy_bytes_per_s
        compute_s = 2 * num_tokens * top_k * 3 * hidden_size * width / bench.ceilings.matmul_flops
        taken_s = gpu.device_s(partial(work, ours)) / _DRAWS
        loop_s = seconds(gpu, partial(work, loop)) / _DRAWS
        row = {
            "part": "experts", "tokens": num_tokens, "active": active, "us": taken_s * 1e6, "loop us": loop_s * 1e6,
            "reading us": read_s * 1e6, "arithmetic us": compute_s * 1e6, "of reading": taken_s / read_s,
            "of the longer": taken_s / max(read_s, compute_s), "of the loop": taken_s / loop_s, "error": error,
            "mxfp4 us": gpu.device_s(partial(work, of_4_bits)) / _DRAWS * 1e6, "mxfp4 error": error_4_bits,
        }  # fmt: skip
        try:
            row["torch's us"] = gpu.device_s(partial(work, by_torch)) / _DRAWS * 1e6
        except (RuntimeError, ValueError) as problem:
            found.notes.append(f"torch's grouped product of {num_tokens} tokens: {problem}".splitlines()[0])
        found.rows.append(row)
        found.checks += [
            Check(f"experts of {num_tokens} tokens differ from the loop (relative)", f"<= {_BOUND}", error),
            Check(
                f"experts in mxfp4 of {num_tokens} tokens differ from the loop (relative)", f"<= {_BOUND}", error_4_bits
            ),
            Check(f"experts of {num_tokens} tokens: time ÷ reading the active ones", "<= 1.3", taken_s / read_s),
            Check(f"experts of {num_tokens} tokens: time ÷ a loop over experts", "<= 1", taken_s / loop_s),
        ]
    return found
