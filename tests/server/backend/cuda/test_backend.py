from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from llmservice_server.backend.agreement import Case, why_wrong
from llmservice_server.backend.base import Attention, Decoder
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda import backend as cuda_backend
from llmservice_server.backend.cuda import linear as cuda_linear
from llmservice_server.backend.cuda.attention import TritonAttention
from llmservice_server.backend.cuda.backend import CudaBackend, TritonLayerOps, why_triton_is_unusable
from llmservice_server.backend.cuda.experts import CudaExperts
from llmservice_server.backend.cuda.linear import CudaQuantizedLinear
from llmservice_server.backend.experts import Experts
from llmservice_server.backend.quantized import Activations, QuantizedLinear, QuantizedWeight
from llmservice_server.backend.sampling_batch import SamplingBatch, stream_states
from llmservice_server.backend.step_input import StepInput
from llmservice_server.backend.torch import sampler
from llmservice_server.backend.torch.attention import TorchAttention, TorchStep
from llmservice_server.types.errors import ConfigError

CPU = torch.device("cpu")
SHAPE = KVCacheShape(4, 2, 64, (None,), 16, torch.float32)
CASE = Case(SHAPE, torch.float32, ((5, 1), (0, 3)))


class ForgetsAToken(TorchAttention):
    def prepare(self, step: StepInput) -> TorchStep:
        return super().prepare(replace(step, starts=np.maximum(step.starts - 1, 0)))


def test_kernels_that_agree_with_torch_are_usable() -> None:
    assert why_triton_is_unusable(SHAPE, torch.float32, CPU) is None
    assert why_wrong([CASE], TritonAttention, CPU) is None


def test_a_backend_with_a_wrong_output_is_refused() -> None:
    case = Case(SHAPE, torch.float32, ((30, 1),))
    problem = why_wrong([case], ForgetsAToken, CPU)
    assert problem is not None
    assert problem.startswith("its output is off by")


def test_a_backend_with_nan_is_refused() -> None:
    def unfilled(shape: KVCacheShape, num_blocks: int, device: torch.device) -> Attention:
        class Unfilled(TorchAttention):
            def prepare(self, step):  # type: ignore[no-untyped-def]
                return lambda layer, query, key_value, sinks: torch.full((len(query), 256), torch.nan)

        return Unfilled(shape, num_blocks, device)

    assert why_wrong([CASE], unfilled, CPU) == "its output is off by nan, at most 1e-05 is right for torch.float32"


def test_a_backend_that_raises_is_refused() -> None:
    def broken(*_: object) -> Attention:
        raise RuntimeError("no kernel image is available for this device\nand more")

    assert why_wrong([CASE], broken, CPU) == "RuntimeError: no kernel image is available for this device"


class Model:
    config = SimpleNamespace(vocab_size=500)

    def map_linears(self, convert: object) -> None:
        """It has none."""

    def mixtures(self) -> tuple[()]:
        return ()


def test_a_kernel_that_fails_its_check_is_replaced_by_torch_only_where_the_choice_was_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_backend, "top_k_top_p_kernel", lambda weights, wanted, by_mass: weights)
    lenient = CudaBackend(SHAPE, CPU, "a test")
    lenient.prepare(Model())  # type: ignore[arg-type]
    assert lenient.fallbacks == {
        "top_k_top_p": "our kernels for sampling are unusable here: their results differ from torch's"
    }
    strict = CudaBackend(SHAPE, CPU, "a test", may_fall_back=False)
    with pytest.raises(ConfigError, match=r"attention is triton, but our kernels .* use --attention auto"):
        strict.prepare(Model())  # type: ignore[arg-type]


def test_a_seed_draws_the_tokens_that_torch_draws_each_time() -> None:
    backend = CudaBackend(SHAPE, CPU, "a test")
    backend.prepare(Model())  # type: ignore[arg-type]
    assert not backend.fallbacks
    logits = 3 * torch.randn(8, 500, generator=torch.Generator().manual_seed(0))
    batch = replace(SamplingBatch.identical(8, temperature=0.7), streams=stream_states(range(8)))
    batch.parameters[1::2, 1] = 40  # top-k
    batch.parameters[2:, 2] = 0.9  # top-p
    expected = sampler.choose(logits.clone(), batch)
    assert torch.equal(backend.choose_tokens(logits.clone(), batch), expected)
    assert torch.equal(backend.choose_tokens(logits.clone(), batch), expected)


def test_graphs_that_fail_their_check_are_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "_captures", True)
    monkeypatch.setattr(cuda_backend.decode_graphs, "capture_graphs", lambda *_: "it differs by 0.3")
    attention = TritonAttention(SHAPE, 2, CPU)
    lenient, strict = (CudaBackend(SHAPE, CPU, "a test", may_fall_back=may) for may in (True, False))
    path = lenient.decode_path(Mock(spec=Decoder), attention, max_num_seqs=1, max_model_len=16)
    assert path is None
    assert lenient.fallbacks == {"decode_graphs": "CUDA graphs of steps are unusable here: it differs by 0.3"}
    with pytest.raises(ConfigError, match=r"differs by 0\.3: use --attention auto"):
        strict.decode_path(Mock(spec=Decoder), attention, max_num_seqs=1, max_model_len=16)


def test_head_dimensions_above_576_are_refused() -> None:
    shape = KVCacheShape(4, 2, 1024, (None,), 16, torch.float32)
    assert "head dimensions up to 576" in (why_triton_is_unusable(shape, torch.float32, CPU) or "")


@pytest.mark.parametrize(("activations", "group"), [("fp8", 128), ("int8", None), ("fp8", None), (None, 128)])
def test_products_are_compared_with_what_they_compute(activations: Activations | None, group: int | None) -> None:
    """With rounded activations only where they round them: else the difference is larger than what is allowed."""
    random = torch.Generator().manual_seed(0)
    values = (torch.rand(256, 256, generator=random) * 200 - 100).to(
        torch.int8 if activations == "int8" else torch.float8_e4m3fn
    )
    scales = torch.rand(256 if group is None else 2, 1 if group is None else 2, generator=random) / 100
    weight = QuantizedWeight(values, scales, rows=1 if group is None else 128, group=group, activations=activations)
    linear = QuantizedLinear(weight, torch.bfloat16)
    product = CudaQuantizedLinear.of(linear)
    assert product.rounds == (activations == "fp8" and group is None)
    if not product.rounds:  # the interpreter rounds to fp8 otherwise than torch
        assert cuda_backend._why_wrong(product, linear) is None
    experts = Experts([linear] * 3, [QuantizedLinear(replace(weight, values=values[:, :128]), torch.bfloat16)] * 3)
    if group is None:
        grouped = CudaExperts.of(experts)
        assert grouped is not None
        model = SimpleNamespace(
            config=SimpleNamespace(hidden_size=256), dtype=torch.bfloat16, device=CPU, ops=TritonLayerOps()
        )
        assert cuda_backend._why_experts_are_wrong(grouped, experts, model) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", ["quantized_product", "dequantized"])
def test_products_of_few_and_of_many_rows_are_both_checked(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randint(-100, 100, (64, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    weight = QuantizedWeight(values, torch.ones(64, 1))
    linear = QuantizedLinear(weight, torch.float32)
    assert cuda_backend._why_wrong(CudaQuantizedLinear.of(linear), linear) is None
    monkeypatch.setattr(cuda_linear, broken, Mock(side_effect=RuntimeError("out of resource: shared memory")))
    problem = cuda_backend._why_wrong(CudaQuantizedLinear.of(linear), linear)
    assert problem == "RuntimeError: out of resource: shared memory"
