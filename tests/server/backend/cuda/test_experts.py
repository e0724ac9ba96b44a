"""A mixture on a GPU, with our kernel in Triton's interpreter."""

import pytest
import torch

from llmservice_server.backend.cuda.backend import TritonLayerOps
from llmservice_server.backend.cuda.experts import CudaExperts
from llmservice_server.backend.experts import Experts, LowRankExperts
from llmservice_server.backend.quantized import QuantizedLinear, QuantizedWeight
from llmservice_server.backend.torch.layer_ops import TorchLayerOps, TorchLinear

HIDDEN, WIDTH, NUM_EXPERTS = 48, 32, 6


def experts(*, biases: bool, together: bool = True) -> Experts:
    random = torch.Generator().manual_seed(0)

    def matrices(outputs: int, inputs: int) -> list[TorchLinear]:
        stack = torch.randn(NUM_EXPERTS, outputs, inputs, generator=random)
        bias = torch.randn(NUM_EXPERTS, outputs, generator=random)
        return [
            TorchLinear(stack[each] if together else stack[each].clone(), bias[each] if biases else None)
            for each in range(NUM_EXPERTS)
        ]

    return Experts([*matrices(2 * WIDTH, HIDDEN)], [*matrices(HIDDEN, WIDTH)])


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_the_product_of_all_experts_agrees_with_the_loop(biases: bool, num_tokens: int) -> None:
    loop = experts(biases=biases)
    product = CudaExperts.of(loop)
    assert product is not None
    hidden = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    weights, chosen = torch.rand(num_tokens, NUM_EXPERTS).topk(3)
    expected = loop(hidden, chosen, weights, TorchLayerOps())
    torch.testing.assert_close(product(hidden, chosen, weights, TritonLayerOps()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(1,), (1, 5), (5, 40, 9)])
@pytest.mark.parametrize("biases", [False, True])
def test_what_adapters_add_to_experts_agrees_with_the_loop(
    monkeypatch: pytest.MonkeyPatch, biases: bool, sizes: tuple[int, ...]
) -> None:
    """The second has none."""
    monkeypatch.setattr("llmservice_server.backend.cuda.experts._ADAPTED_TOKENS", 16)
    loop = experts(biases=biases)
    product = CudaExperts.of(loop)
    assert product is not None
    random, rank = torch.Generator().manual_seed(2), 4
    shapes = (2 * rank, HIDDEN), (2 * WIDTH, 2 * rank), (rank, WIDTH), (HIDDEN, rank)
    rows: list[tuple[slice, LowRankExperts | None]] = []
    for number, size in enumerate(sizes):
        change = LowRankExperts.of(torch.randn(NUM_EXPERTS, *shape, generator=random) / 8 for shape in shapes)
        first = rows[-1][0].stop if rows else 0
        rows.append((slice(first, first + size), None if number == 1 else change))
    hidden = torch.randn(sum(sizes), HIDDEN, generator=random)
    weights, chosen = torch.rand(sum(sizes), NUM_EXPERTS, generator=random).topk(3)
    expected = loop.adapted(hidden, chosen, weights, TorchLayerOps(), rows)
    assert not torch.allclose(expected, loop(hidden, chosen, weights, TorchLayerOps()))
    ours = product.adapted(hidden, chosen, weights, TritonLayerOps(), rows)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_matrices_of_their_own_are_left_to_the_loop() -> None:
    assert CudaExperts.of(experts(biases=False, together=False)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["4 bits, zeros", "8 bits", "fp8, blocks", "mxfp4", "nvfp4", "nf4"])
def test_quantised_experts_are_multiplied_in_one_product(kind: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)

    def matrices(outputs: int, inputs: int) -> list[QuantizedLinear]:
        return [QuantizedLinear(quantized(kind, outputs, inputs, random), dtype) for _ in range(NUM_EXPERTS)]

    loop = Experts([*matrices(256, 128)], [*matrices(128, 128)])
    product = CudaExperts.of(loop)
    assert product is not None
    assert product.nbytes == loop.nbytes
    hidden = torch.randn(9, 128, generator=random).to(dtype)
    weights, chosen = torch.rand(9, NUM_EXPERTS, generator=random).topk(2)
    expected = loop(hidden, chosen, weights, TorchLayerOps()).float()
    ours = product(hidden, chosen, weights, TritonLayerOps()).float()
    assert (ours - expected).norm() < (1e-4 if dtype == torch.float32 else 2e-2) * expected.norm()


def quantized(kind: str, outputs: int, inputs: int, random: torch.Generator) -> QuantizedWeight:
    scales = 0.01 + 0.01 * torch.rand(outputs, inputs // 32, generator=random)
    if kind == "4 bits, zeros":
        values = torch.randint(0, 256, (outputs, inputs // 2), generator=random).to(torch.uint8)
        zeros = torch.randint(-8, 8, scales.shape, generator=random).to(torch.int8)
        return QuantizedWeight(values, scales, zeros, group=32)
    if kind == "mxfp4":
        values = torch.randint(0, 256, (outputs, inputs // 2), generator=random).to(torch.uint8)
        powers = torch.randint(110, 120, scales.shape, generator=random).to(torch.uint8)
        return QuantizedWeight(values, powers.view(torch.float8_e8m0fnu), group=32)
    if kind == "nvfp4":
        values = torch.randint(0, 256, (outputs, inputs // 2), generator=random).to(torch.uint8)
        eighths = (torch.rand(outputs, inputs // 16, generator=random) / 8).to(torch.float8_e4m3fn)
        by_output = 0.1 + torch.rand(outputs, 1, generator=random).double()
        return QuantizedWeight(values, eighths, group=16, output_scales=by_output)
    if kind == "nf4":
        values = torch.randint(0, 256, (outputs, inputs // 2), generator=random).to(torch.uint8)
        return QuantizedWeight(values, scales, group=32, table=torch.linspace(-1, 1, 16))
    values = torch.randint(-100, 100, (outputs, inputs), generator=random)
    if kind == "8 bits":
        return QuantizedWeight(values.to(torch.int8), scales[:, :1])
    return QuantizedWeight(values.float().to(torch.float8_e4m3fn), scales[::128, ::4].clone(), rows=128, group=128)


def test_experts_of_different_formats_are_left_to_the_loop() -> None:
    random = torch.Generator().manual_seed(0)
    weights = [quantized(kind, 128, 128, random) for kind in ("8 bits", "fp8, blocks")]
    linears = [QuantizedLinear(weight, torch.float32) for weight in weights]
    assert CudaExperts.of(Experts([*linears], [*linears])) is None
