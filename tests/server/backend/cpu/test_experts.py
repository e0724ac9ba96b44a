"""The kernel for a mixture's experts agrees with the loop over them."""

import pytest
import torch

from llmservice_server.backend.base import Activation
from llmservice_server.backend.cpu.experts import CpuExperts
from llmservice_server.backend.cpu.layer_ops import CpuLayerOps
from llmservice_server.backend.cpu.linear import FAST_ROWS, pack
from llmservice_server.backend.experts import Experts
from llmservice_server.backend.torch.layer_ops import TorchLayerOps, TorchLinear

pytestmark = pytest.mark.slow

NUM_EXPERTS, HIDDEN, WIDTH = 5, 128, 192
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def experts(dtype: torch.dtype, *, biases: bool, activation: Activation = "silu") -> Experts:
    torch.manual_seed(0)

    def matrix(outputs: int, inputs: int) -> TorchLinear:
        bias = torch.randn(outputs).to(dtype) if biases else None
        return TorchLinear((torch.randn(outputs, inputs) * inputs**-0.5).to(dtype), bias)

    gate_up = [matrix(2 * WIDTH, HIDDEN) for _ in range(NUM_EXPERTS)]
    return Experts(list(gate_up), [matrix(HIDDEN, WIDTH) for _ in range(NUM_EXPERTS)], activation)


@dtypes
@pytest.mark.parametrize(("biases", "activation"), [(False, "silu"), (True, "clamped_silu")])
@pytest.mark.parametrize("num_tokens", [1, 6, 2 * NUM_EXPERTS * FAST_ROWS])
def test_the_kernel_agrees_with_the_loop(
    dtype: torch.dtype, biases: bool, activation: Activation, num_tokens: int
) -> None:
    plain, packed = (experts(dtype, biases=biases, activation=activation) for _ in range(2))
    packed.map_linears(pack)
    kernel = CpuExperts.of(packed, dtype)
    if kernel is None:
        pytest.skip("the kernel cannot read what oneDNN packs here")
    hidden = 4 * torch.randn(num_tokens, HIDDEN).to(dtype)  # so that some are bounded
    weights, chosen = torch.rand(num_tokens, NUM_EXPERTS - 1).topk(2)  # the last expert is never chosen
    expected = plain(hidden, chosen, weights, TorchLayerOps()).float()
    ours = kernel(hidden, chosen, weights, CpuLayerOps(threaded=True)).float()
    assert (ours - expected).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * expected.norm()


def test_each_token_gets_the_weighted_sum_of_its_experts() -> None:
    mixture, ops = experts(torch.float32, biases=True), TorchLayerOps()
    hidden = torch.randn(9, HIDDEN)
    weights, chosen = torch.rand(9, NUM_EXPERTS).topk(3)
    expected = torch.zeros_like(hidden)
    for token in range(9):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gated = ops.gated(mixture.gate_up[expert](hidden[token : token + 1]), "silu")
            expected[token] += weight * mixture.down[expert](gated)[0]
    torch.testing.assert_close(mixture(hidden, chosen, weights, ops), expected)
