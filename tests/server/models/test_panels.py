"""Products by kernels of our own are those of torch."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.models.linear import FEW_ROWS, Linear, can_pack

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@dtypes
@pytest.mark.parametrize("num_rows", [1, 7, FEW_ROWS])
@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_are_the_product_of_the_norms(dtype: torch.dtype, num_rows: int, with_bias: bool) -> None:
    if not can_pack(dtype):
        pytest.skip(f"this CPU has no packed product of {dtype}")
    dice = torch.Generator().manual_seed(0)
    weight, norm, bias = (torch.randn(*shape, generator=dice).to(dtype) for shape in ((192, 96), (96,), (192,)))
    linear = Linear(weight.clone(), bias if with_bias else None)
    linear.pack()
    linear.find_panels()
    hidden = torch.randn(num_rows, 96, generator=dice).to(dtype)
    panels = linear.panels_for(hidden)
    if panels is None:
        pytest.skip("what oneDNN packs for this CPU is not laid out in panels")
    exact = F.linear(
        F.rms_norm(hidden.double(), (96,), norm.double(), 1e-5), weight.double(), bias.double() if with_bias else None
    )
    logits = panels.logits(hidden, norm, 1e-5)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.to(dtype).float()), "rounded as the model's other products are"
    off = (logits.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert (off < 4 * torch.finfo(dtype).eps).all(), off


def test_many_rows_are_left_to_torch() -> None:
    linear = Linear(torch.randn(64, 64))
    linear.pack()
    linear.find_panels()
    assert linear.panels_for(torch.zeros(FEW_ROWS + 1, 64)) is None
