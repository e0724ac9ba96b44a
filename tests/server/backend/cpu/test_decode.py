"""A decode step in one call agrees with the model computed operation by operation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cpu.attention import CpuAttention
from llmservice_server.backend.cpu.backend import CpuBackend
from llmservice_server.backend.cpu.decode import CpuDecode, can_decode
from llmservice_server.backend.cpu.int4 import Int4Linear
from llmservice_server.backend.cpu.linear_kernels import HAS_QUAD_PRODUCT
from llmservice_server.backend.layers import linears_of
from llmservice_server.backend.quantized import QuantizedLinear, QuantizedWeight
from llmservice_server.backend.step_input import StepInput
from llmservice_server.backend.torch.layer_ops import TorchLinear
from llmservice_server.models.architectures import ARCHITECTURES
from llmservice_server.models.config import ModelConfig
from llmservice_server.models.decoder import DecoderModel
from llmservice_server.models.weights import Weights

pytestmark = pytest.mark.slow

BLOCK_SIZE, VOCABULARY = 4, 100
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama with biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "mistral, a window": {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 6},
    "qwen2, biases": {**LLAMA, "architectures": ["Qwen2ForCausalLM"]},
    "qwen3, norms of queries and keys": {**LLAMA, "architectures": ["Qwen3ForCausalLM"]},
}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SOAK = pytest.mark.soak
"""For what takes ten seconds to compile, and differs by a conversion that another test has."""


def int4(weight: torch.Tensor) -> QuantizedWeight:
    """In groups of 64, with zeros where the number of outputs is a multiple of 128."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, -1, 64)
    scales = (groups.abs().amax(-1, keepdim=True) / 7).to(weight.dtype)
    zeros = torch.full((outputs, inputs // 64), 1, dtype=torch.int8) if outputs % 128 == 0 else None
    values = ((groups / scales.float()).round() + 8 + (zeros is not None)).clamp(0, 15).view(outputs, inputs)
    packed = values[:, ::2].to(torch.uint8) | values[:, 1::2].to(torch.uint8) << 4
    return QuantizedWeight(packed, scales.squeeze(-1), zeros, group=64)


def nvfp4(weight: torch.Tensor) -> QuantizedWeight:
    """Random numbers of the matrix's size."""
    outputs, inputs = weight.shape
    values = torch.randint(0, 256, (outputs, inputs // 2)).to(torch.uint8)
    scales = (torch.rand(outputs, inputs // 16) / 16).to(torch.float8_e4m3fn)
    return QuantizedWeight(values, scales, group=16, output_scales=torch.rand(outputs, 1).double())


def random_model(
    raw: dict[str, Any], dtype: torch.dtype, quantize: Callable[[torch.Tensor], QuantizedWeight] | None = None
) -> DecoderModel:
    weights = Weights(dtype, torch.device("cpu"))
    config = ModelConfig.from_dict(raw)
    model = DecoderModel(config, weights, ARCHITECTURES[config.architecture])
    random = torch.Generator().manual_seed(0)
    for name, tensor in weights.tensors.items():
        if "norm" in name:
            tensor.normal_(1.0, 0.1, generator=random)
        elif name.endswith("bias"):
            tensor.normal_(std=0.1, generator=random)
        else:
            tensor.normal_(std=1.0 if "embed" in name else tensor.shape[1] ** -0.5, generator=random)
    weights.finish()
    if quantize is not None:
        model.map_linears(lambda linear: QuantizedLinear(quantize(linear.weight), dtype, linear.bias))
        model.lm_head = TorchLinear(torch.zeros_like(model.embed_tokens))
    shape = attention_of(model).shape
    CpuBackend(shape, model.device, "a test", worth_compiling=True).prepare(model)
    return model


def attention_of(model: DecoderModel, cache_dtype: torch.dtype | None = None) -> CpuAttention:
    attention = CpuAttention(KVCacheShape.of(model.config, BLOCK_SIZE, cache_dtype or model.dtype), 40)
    for cache in attention.caches:
        cache.fill_(torch.nan)  # what was never stored must not be read
    return attention


def decode_both(model: DecoderModel, num_seqs: int, steps: int, cache_dtype: torch.dtype | None = None) -> float:
    """Prompts of several lengths, then `steps` tokens of each; the largest relative difference of a step's states."""
    attention, plain = attention_of(model, cache_dtype), attention_of(model, cache_dtype)
    decode = CpuDecode(model, attention, num_seqs)
    tables = [[1 + number + num_seqs * place for place in range(4)] for number in range(num_seqs)]  # fragmented
    random = torch.Generator().manual_seed(1)
    furthest = 0.0
    for step in range(-1, steps):
        runs = [
            (0, 1 + number, table) if step < 0 else (1 + number + step, 1, table) for number, table in enumerate(tables)
        ]
        token_ids = torch.randint(VOCABULARY, (sum(count for _, count, _ in runs),), generator=random)
        given = StepInput.of(runs, token_ids.tolist())
        positions = torch.from_numpy(given.positions)
        expected = model.forward(token_ids, positions, plain.prepare(given)).float()
        if step < 0:
            assert not decode.takes(given) or num_seqs == 1
            model.forward(token_ids, positions, attention.prepare(given))
            continue
        assert decode.takes(given)
        states = decode.run(given).float()
        furthest = max(furthest, float((states - expected).norm() / expected.norm()))
    for cache, same in zip(attention.caches, plain.caches, strict=True):
        assert torch.equal(cache.isnan(), same.isnan())
    return furthest


@dtypes
@pytest.mark.parametrize("family", FAMILIES)
def test_states_agree_with_the_model(family: str, dtype: torch.dtype) -> None:
    model = random_model(FAMILIES[family], dtype)
    if not can_decode(model):
        pytest.skip("the kernels cannot read what oneDNN packs on this CPU")
    for num_seqs in (1, 3, 8):
        assert decode_both(model, num_seqs, steps=4) < 40 * torch.finfo(dtype).eps


@pytest.mark.skipif(not HAS_QUAD_PRODUCT, reason="this CPU multiplies no 8-bit integers")
@pytest.mark.parametrize("family", ["llama", "qwen2, biases"])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=SOAK), torch.bfloat16])
def test_states_agree_with_the_model_of_8_bit_matrices(family: str, dtype: torch.dtype) -> None:
    model = random_model(FAMILIES[family], dtype, QuantizedWeight.int8)
    for num_seqs in (1, 3, 8):
        assert decode_both(model, num_seqs, steps=2) < 0.03  # where a number is rounded otherwise, all others change


@pytest.mark.parametrize(
    ("family", "quantize"),
    [("llama", int4), ("qwen2, biases", int4), pytest.param("llama", nvfp4, marks=SOAK)],
)
def test_states_agree_with_the_model_of_4_bit_matrices(
    family: str, quantize: Callable[[torch.Tensor], QuantizedWeight]
) -> None:
    model = random_model(FAMILIES[family], torch.bfloat16, quantize)
    assert {type(linear) for layer in model.layers for linear in linears_of(layer)} == {Int4Linear}
    for num_seqs in (1, 3, 8):
        assert decode_both(model, num_seqs, steps=2) < 40 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SOAK)])
def test_cache_of_another_dtype(dtype: torch.dtype) -> None:
    model = random_model(LLAMA, dtype)
    if not can_decode(model):
        pytest.skip("the kernels cannot read what oneDNN packs on this CPU")
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    assert decode_both(model, 3, steps=3, cache_dtype=other) < 40 * torch.finfo(torch.bfloat16).eps


def test_more_than_max_num_seqs_sequences_are_refused() -> None:
    model = random_model(LLAMA, torch.float32)
    if not can_decode(model):
        pytest.skip("the kernels cannot read what oneDNN packs on this CPU")
    decode = CpuDecode(model, attention_of(model), 2)
    assert decode.takes(StepInput.of([(3, 1, [1]), (2, 1, [2])]))
    assert not decode.takes(StepInput.of([(3, 1, [1])] * 3))
    assert not decode.takes(StepInput.of([(0, 2, [1])]))


@pytest.mark.parametrize("other", [{"intermediate_size": 200}, {"hidden_size": 120}])
def test_a_model_of_other_widths_is_refused(other: dict[str, int]) -> None:
    model = random_model({**LLAMA, **other}, torch.float32)
    assert not can_decode(model)
