"""The kernels between the products compute what torch computes."""

import pytest
import torch

from llmservice_server.backend.base import LayerOps
from llmservice_server.backend.cpu.layer_ops import CpuLayerOps, ThreadedCpuLayerOps
from llmservice_server.backend.torch.layer_ops import TorchLayerOps

pytestmark = pytest.mark.slow

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
num_rows = pytest.mark.parametrize("num_rows", [1, 5, 3000])  # so many that torch does it for the serial ones

each = pytest.mark.parametrize("ops", [CpuLayerOps(), ThreadedCpuLayerOps()], ids=["serial", "threaded"])


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """`exact` is computed in float64 from the same numbers; ours is rounded once, torch's every time."""
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), exact, rtol=8 * eps, atol=8 * eps)


@each
@dtypes
@num_rows
@pytest.mark.parametrize("with_delta", [False, True])
def test_norm_of_the_sum(ops: LayerOps, dtype: torch.dtype, num_rows: int, with_delta: bool) -> None:
    hidden, delta, weight = (torch.randn(rows, 96).to(dtype) for rows in (num_rows, num_rows, 1))
    total = hidden + delta if with_delta else hidden.clone()
    normed = ops.add_norm(hidden, delta if with_delta else None, weight[0], 1e-5)
    assert torch.equal(hidden, total)
    assert_close(normed, TorchLayerOps().add_norm(total.double(), None, weight[0].double(), 1e-5))


@each
@dtypes
@num_rows
def test_activation(ops: LayerOps, dtype: torch.dtype, num_rows: int) -> None:
    gate_up = 4 * torch.randn(num_rows, 2 * 70).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -30.0, 30.0])
    exact = TorchLayerOps().silu_mul(gate_up.double())
    assert_close(ops.silu_mul(gate_up), exact)


@each
@dtypes
def test_what_is_not_finite_is_not_hidden(ops: LayerOps, dtype: torch.dtype) -> None:
    rows = torch.ones(2, 32, dtype=dtype)
    rows[0, 3] = torch.nan
    weight = torch.ones(32, dtype=dtype)
    for result in (ops.add_norm(rows.clone(), rows, weight, 1e-5), ops.silu_mul(rows)):
        assert result[0].isnan().any()
        assert result[1].isfinite().all()
