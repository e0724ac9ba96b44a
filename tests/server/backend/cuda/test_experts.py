"""A mixture on a GPU, with our kernel in Triton's interpreter."""

import pytest
import torch

from llmservice_server.backend.cuda.backend import TritonLayerOps
from llmservice_server.backend.cuda.experts import CudaExperts
from llmservice_server.backend.experts import Experts
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


def test_matrices_of_their_own_are_left_to_the_loop() -> None:
    assert CudaExperts.of(experts(biases=False, together=False)) is None
