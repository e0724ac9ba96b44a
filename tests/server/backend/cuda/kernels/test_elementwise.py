import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.cuda.kernels.elementwise import add_rms_norm, silu_mul

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 100), (2, 4096)])
def test_the_sum_is_kept_and_normed(dtype: torch.dtype, num_rows: int, size: int) -> None:
    torch.manual_seed(0)
    hidden, delta, weight = (torch.randn(*shape).to(dtype) for shape in ((num_rows, size), (num_rows, size), (size,)))
    total = hidden + delta
    normed = add_rms_norm(hidden, delta, weight, 1e-5)
    torch.testing.assert_close(hidden, total, rtol=BOUNDS[dtype], atol=1e-6)
    expected = F.rms_norm(total.float(), (size,), weight.float(), 1e-5)
    assert (normed.float() - expected).norm() / expected.norm() < BOUNDS[dtype]


def test_without_a_sum_the_states_stay_as_they_are() -> None:
    hidden, weight = torch.randn(4, 96), torch.randn(96)
    before = hidden.clone()
    normed = add_rms_norm(hidden, None, weight, 1e-6)
    assert torch.equal(hidden, before)
    torch.testing.assert_close(normed, F.rms_norm(before, (96,), weight, 1e-6))


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
