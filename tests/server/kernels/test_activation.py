import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.kernels.activation import silu_mul


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("size", [1, 100, 1500])
def test_silu_times_gate(dtype: torch.dtype, bound: float, size: int) -> None:
    torch.manual_seed(0)
    gate_up = (10 * torch.randn(3, 2 * size)).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    expected = F.silu(gate) * up
    assert (silu_mul(gate_up).float() - expected).norm() / expected.norm() < bound


def test_large_gates_do_not_overflow() -> None:
    gate_up = torch.tensor([[1e30, -1e30, 2.0, 3.0]])
    torch.testing.assert_close(silu_mul(gate_up), torch.tensor([[2e30, 0.0]]))
