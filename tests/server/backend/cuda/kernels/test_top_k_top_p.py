import pytest
import torch

import harness.triton_interpreter  # noqa: F401
from llmservice_server.backend.cuda.backend import why_unusable
from llmservice_server.backend.cuda.kernels.top_k_top_p import top_k_top_p
from llmservice_server.backend.torch import sampler as by_torch

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 50, 5000])
def test_the_kernel_cuts_as_torch_does(size: int) -> None:
    assert why_unusable(top_k_top_p, size, CPU) is None


@pytest.mark.parametrize("by_mass", [False, True])
@pytest.mark.parametrize("cut", [top_k_top_p, by_torch.top_k_top_p], ids=["kernel", "torch"])
def test_of_equal_weights_the_first_stay(cut: by_torch.TopKTopP, by_mass: bool) -> None:
    weights = torch.tensor([[0.5, 1.0, 0.5, 0.25, 0.5], [0.0, 1.0, 0.0, 0.0, 1.0]])
    left = cut(weights, torch.tensor([2.0, 5.0], dtype=torch.float64), by_mass)
    stays = [0.5, 1.0, 0.5 if by_mass else 0.0, 0.0, 0.0]
    assert left.tolist() == [stays, [0.0, 1.0, 0.0, 0.0, 1.0]]


def test_a_kernel_that_differs_or_raises_is_unusable() -> None:
    def one_less(weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
        return by_torch.top_k_top_p(weights, wanted * 0.9, by_mass)

    def raises(weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
        raise RuntimeError("no kernel image is available\nand more")

    assert why_unusable(one_less, 500, CPU) == "its results differ from torch's"
    assert why_unusable(raises, 500, CPU) == "RuntimeError: no kernel image is available"
