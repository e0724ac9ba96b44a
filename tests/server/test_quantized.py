"""Checkpoints of every quantised format: their weights, their logits, their size, and what is refused.

Each is written here by its method's published formula, and those of compressed-tensors by that library.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import OlmoeConfig, OlmoeForCausalLM

from harness.checkpoints.families import FAMILIES, OTHERS, save
from harness.checkpoints.quantized import (
    CONFIG,
    FORMATS,
    SHAPES,
    TOKEN,
    Format,
    Tensors,
    dense_tensors,
    fp4,
    write,
    write_both,
)
from llmservice_planner.model.checkpoint import StoredTensor
from llmservice_planner.model.quantization import QUANTIZATIONS, Quantization, WeightFormat
from llmservice_planner.model.quantization_config import read_quantization
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.model.weight_counts import WeightCounts
from llmservice_planner.sizing import gpu
from llmservice_planner.sizing.plan import SizingRequest, plan
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.choice import choose_backend
from llmservice_server.backend.cpu import int4
from llmservice_server.backend.cpu.int4 import Int4Linear
from llmservice_server.backend.cpu.int8 import Int8Linear
from llmservice_server.backend.cpu.linear_kernels import HAS_QUAD_PRODUCT
from llmservice_server.backend.layers import Linear, linears_of
from llmservice_server.backend.quantized import QuantizedWeight, fuse
from llmservice_server.backend.step_input import StepInput
from llmservice_server.engine.config import EngineConfig, Implementation
from llmservice_server.models.quantization import read
from llmservice_server.runtime.loader import Checkpoint
from llmservice_server.runtime.startup import start
from llmservice_server.types.errors import ConfigError, ModelLoadError

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
Q_PROJ = "model.layers.1.self_attn.q_proj"
needs_vnni = pytest.mark.skipif(not HAS_QUAD_PRODUCT, reason="this CPU multiplies no 8-bit integers")


each_format = pytest.mark.parametrize("name", FORMATS)


def loaded(
    folder: Path, quantization: Quantization, dtype: torch.dtype = torch.float32, code: Implementation = "own"
) -> Any:
    backend = choose_backend("auto", kv_cache(dtype), dtype, CPU, max_num_batched_tokens=64)
    model = Checkpoint.open(folder, code).load(dtype, CPU, quantization, backend.keeps)
    backend.prepare(model)
    return model


def kv_cache(dtype: torch.dtype) -> KVCacheShape:
    return KVCacheShape(4, 2, 64, (None, None), 16, dtype)


def logits(model: Any) -> torch.Tensor:
    shape = KVCacheShape.of(model.config, 16, model.dtype)
    attention = choose_backend("torch", shape, model.dtype, CPU, max_num_batched_tokens=64).attention(4)
    tokens = torch.arange(40) * 7 % 320
    with torch.inference_mode():
        attend = attention.prepare(StepInput.of([(0, 40, [1, 2, 3])], tokens.tolist()))
        states = model.forward(tokens, torch.arange(40), attend)
        if model.dtype != torch.float64:
            return model.logits(states)
        return F.linear(F.rms_norm(states, (256,), model.norm, model.config.rms_norm_eps), model.lm_head.weight)


both_codes = pytest.mark.parametrize("code", ["own", "transformers"])


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).abs().max() / expected.abs().max())


@both_codes
@each_format
def test_dequantised_weights_are_bit_equal_to_the_formulas(tmp_path: Path, name: str, code: Implementation) -> None:
    form = FORMATS[name]
    quantized, exact = write_both(tmp_path, form)
    ours, expected = (Checkpoint.open(each, code).load(form.dtype, CPU, "dense") for each in (quantized, exact))
    linears: list[list[Linear]] = [[], []]
    for model, found in zip((ours, expected), linears, strict=True):
        model.map_linears(lambda linear, found=found: found.append(linear) or linear)  # type: ignore[misc]
    for linear, reference in zip(*linears, strict=True):
        assert torch.equal(linear.weight, reference.weight)
        assert (linear.bias is None) == (reference.bias is None)


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.weight_only])
@pytest.mark.parametrize(("code", "quantization"), [("own", "auto"), ("own", "stored"), ("transformers", "stored")])
def test_logits_of_weight_only_formats_are_those_of_the_dequantised_model(
    tmp_path: Path, name: str, code: Implementation, quantization: Quantization
) -> None:
    quantized, exact = write_both(tmp_path, FORMATS[name])
    ours, expected = loaded(quantized, quantization, code=code), loaded(exact, "dense")
    assert relative_error(logits(ours), logits(expected)) < 1e-3
    assert ours.weight_bytes < 0.6 * expected.weight_bytes or quantization == "auto"


@dataclass
class Recorded:
    """A product whose quantised inputs are noted, as one that is rounded otherwise changes all that follow."""

    linear: Linear
    inputs: list[torch.Tensor]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        largest = hidden.abs().amax(-1, keepdim=True)
        self.inputs.append((hidden.double() * (127 / largest).double()).round() * (largest / 127).double())
        return self.linear(hidden)


@dataclass
class Replayed:
    """A product of float64 with the next of the inputs."""

    linear: Linear
    inputs: list[torch.Tensor]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(self.inputs.pop(0))


@needs_vnni
def test_logits_of_8_bit_products_are_those_of_the_same_products_in_float64(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    quantized, exact = write_both(tmp_path, FORMATS["W8A8 int8"])
    model, reference = loaded(quantized, "auto"), Checkpoint.open(exact).load(torch.float64, CPU)
    assert isinstance(model.layers[0].attention.qkv, Int8Linear)
    inputs: list[torch.Tensor] = []

    def recorded(linear: Linear) -> Linear:
        return linear if linear is model.lm_head else Recorded(linear, inputs)

    def replayed(linear: Linear) -> Linear:
        return linear if linear is reference.lm_head else Replayed(linear, inputs)

    model.map_linears(recorded)
    ours = logits(model)
    reference.map_linears(replayed)
    assert relative_error(ours.double(), logits(reference)) < 1e-4
    dense = logits(loaded(exact, "dense"))
    divergence = F.kl_div(ours.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="batchmean")
    record_property("mean KL against the dequantised model", float(divergence))
    assert divergence < 0.05


@needs_vnni
@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_a_plain_checkpoint_is_quantised_at_load(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    tensors = dense_tensors()
    if tied:
        del tensors["lm_head.weight"]
    plain = write(tmp_path, tensors, tie_word_embeddings=tied)
    model, dense = loaded(plain, "int8", dtype), loaded(plain, "auto", dtype)
    assert isinstance(linears_of(model.layers[0])[-1], Int8Linear)
    assert isinstance(model.lm_head, Int8Linear)  # a tied one beside the embedding, as a packed one is
    ours, expected = logits(model), logits(dense)
    assert ours.dtype == torch.float32
    assert (ours - expected).norm() < 0.1 * expected.norm()
    sizes = 320 * 256 + 2 * sum(outputs * inputs for outputs, inputs in SHAPES.values())
    outputs = 320 + 2 * sum(outputs for outputs, _ in SHAPES.values())
    assert dense.weight_bytes - model.weight_bytes == sizes * (dtype.itemsize - 1) - 8 * outputs
    shape, name = ModelShape.from_folder(plain), str(dtype).removeprefix("torch.")
    predicted = shape.weights_bytes(name, "int8", on_cpu=True)
    predicted += shape.head_bytes(name, "int8", on_cpu=True) if tied else 0
    assert model.weight_bytes == pytest.approx(predicted, rel=0.01)


@needs_vnni
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device", [gpu.find_gpu("h100"), gpu.CPU(1 << 30)], ids=["GPU", "CPU"])
def test_a_head_with_odd_outputs_is_quantised_on_a_gpu_alone(tmp_path: Path, device: gpu.Device, tied: bool) -> None:
    """Fine-tunes have tokens of their own; a CPU multiplies with 64 outputs at a time."""
    tensors = dense_tensors()
    tensors["model.embed_tokens.weight"] = torch.randn(322, 256)
    tensors["lm_head.weight"] = torch.randn(322, 256)
    if tied:
        del tensors["lm_head.weight"]
    folder = write(tmp_path, tensors, tie_word_embeddings=tied, vocab_size=322)
    request = SizingRequest(
        shape=ModelShape.from_folder(folder), device=device, quantization="int8", dtype="float32", max_model_len=64
    )
    if request.on_cpu:
        model = loaded(folder, "int8")
    else:
        model = Checkpoint.open(folder).load(torch.float32, CPU, "int8", lambda _: True)
    assert model.weight_bytes == pytest.approx(plan(request).weights_bytes, rel=0.01)


@pytest.mark.parametrize("quantization", ["auto", "stored", "dense"])
def test_experts_of_transformers_models_stay_quantised(tmp_path: Path, quantization: Quantization) -> None:
    """Their checkpoints have a matrix for each expert, which transformers puts into one tensor."""
    settings = {key: CONFIG[key] for key in CONFIG if key not in ("architectures", "model_type", "dtype")}
    settings |= {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
    torch.manual_seed(0)
    made = OlmoeForCausalLM(OlmoeConfig(**settings))
    made.save_pretrained(tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    assert tensors["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (256, 128)
    both = write_both(tmp_path, FORMATS["gptq"], tensors, **config)
    ours, expected = (loaded(folder, quantization, code="transformers") for folder in both)
    assert relative_error(logits(ours), logits(expected)) < 1e-3
    experts = [linear for mixture in ours.mixtures() for linear in mixture.experts.gate_up]
    assert len(experts) == 2 * 4
    assert all(isinstance(linear, Int4Linear) == (quantization != "dense") for linear in experts)


@pytest.mark.parametrize("left_out", [".down_proj", ".1.gate_proj", "experts.0.up_proj"])
def test_experts_of_which_some_matrices_are_dense(tmp_path: Path, left_out: str) -> None:
    folder = write_family(tmp_path, "olmoe", FORMATS["gptq"], left_out)
    stored = load_file(folder / "model.safetensors")
    assert any(name.endswith(f"{left_out}.weight") for name in stored)
    ours, expected = (loaded(folder, each, code="transformers") for each in ("stored", "dense"))
    kinds = {type(linear) for mixture in ours.mixtures() for linear in mixture.experts.gate_up + mixture.experts.down}
    assert len(kinds) == 2
    assert relative_error(logits(ours), logits(expected)) < 1e-3


@both_codes
@pytest.mark.parametrize("left_out", [".1.self_attn.q_proj", ".0.mlp.up_proj"])
def test_a_matrix_is_dense_beside_quantised_ones_with_the_same_inputs(
    tmp_path: Path, left_out: str, code: Implementation
) -> None:
    form, made = FORMATS["gptq"], dense_tensors()
    folder, exact = write_both(tmp_path, form, made)
    for each in (folder, exact):
        stored = load_file(each / "model.safetensors")
        name = f"model.layers{left_out}"
        stored = {key: tensor for key, tensor in stored.items() if not key.startswith(name) or key.endswith(".bias")}
        write(
            each, stored | {f"{name}.weight": made[f"{name}.weight"]}, **json.loads((each / "config.json").read_text())
        )
    ours, expected = loaded(folder, "auto", code=code), loaded(exact, "dense")
    assert relative_error(logits(ours), logits(expected)) < 1e-3


@pytest.mark.parametrize("module", ["mlp.experts.1.up_proj", "self_attn.q_proj"])
@pytest.mark.parametrize("shape", [(128, 128), (192, 256)])
def test_a_quantised_matrix_of_a_wrong_shape_is_refused_by_its_name(
    tmp_path: Path, module: str, shape: tuple[int, int]
) -> None:
    form, path = FORMATS["gptq"], write_family(tmp_path, "olmoe", FORMATS["gptq"]) / "model.safetensors"
    tensors, _ = form.quantize(torch.randn(shape))
    save_file(load_file(path) | {f"model.layers.1.{module}.{suffix}": each for suffix, each in tensors.items()}, path)
    with pytest.raises(ModelLoadError, match=rf"layers\.1\.{module} has the shape \[{shape[0]}, {shape[1]}\], config"):
        Checkpoint.open(tmp_path).load(torch.float32, CPU)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (None, r"layers\.1\.mlp\.experts\.down_proj has the shape \[3, 256, 384\], config.json makes it \[4"),
        (9, r"holds model\.layers\.1\.mlp\.experts\.9\..*, for which config.json has too few experts"),
    ],
)
def test_experts_that_are_missing_or_too_many_are_refused(tmp_path: Path, number: int | None, message: str) -> None:
    path = write_family(tmp_path, "olmoe", FORMATS["gptq"]) / "model.safetensors"
    tensors, expert = load_file(path), "layers.1.mlp.experts.1."
    for name in [each for each in tensors if expert in each]:
        if number is None:
            del tensors[name]
        else:
            tensors[name.replace(expert, f"layers.1.mlp.experts.{number}.")] = tensors[name].clone()
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=message):
        Checkpoint.open(tmp_path).load(torch.float32, CPU)


@pytest.mark.parametrize("name", ["fp8 blocks", None])
@pytest.mark.parametrize("extra", ["model.layers.3.", "model.mtp.0.", "model.mtp_block.0."])
def test_what_predicts_further_tokens_is_neither_loaded_nor_counted(
    tmp_path: Path, extra: str, name: str | None
) -> None:
    """GLM-4.5 and DeepSeek V3 have a layer for it after the last, MiMo-V2 and Ernie 4.5 parts of other names."""
    folder = write_family(tmp_path, "glm4-moe", None if name is None else FORMATS[name])
    config, path = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    expected = Checkpoint.open(folder).load(torch.float32, CPU, "stored")
    counted = ModelShape.from_folder(folder).weights_bytes("float32", "stored")
    tensors, last = load_file(path), "model.layers.2."
    assert config["num_hidden_layers"] == 3
    tensors |= {each.replace(last, extra): tensor.clone() for each, tensor in tensors.items() if last in each}
    save_file(tensors, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    ours = Checkpoint.open(folder).load(torch.float32, CPU, "stored")
    assert ours.weight_bytes == expected.weight_bytes
    assert torch.equal(logits(ours), logits(expected))
    assert ModelShape.from_folder(folder).weights_bytes("float32", "stored") == counted


@both_codes
def test_a_file_is_opened_twice_however_many_tensors_it_has(
    tmp_path: Path, code: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening one means parsing the names of all its tensors."""
    quantized, _ = write_both(tmp_path, FORMATS["fp8 blocks"])
    opened: list[Path] = []

    def counted(path: Path, **settings: Any) -> Any:
        opened.append(path)
        return safe_open(path, **settings)

    monkeypatch.setattr("llmservice_server.runtime.weight_files.safe_open", counted)
    Checkpoint.open(quantized, code).load(torch.float32, CPU, "stored")
    assert len(opened) == 2


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


@both_codes
@pytest.mark.parametrize(
    ("form", "method", "names", "apart"),
    [
        ("fp8, one scale", modelopt("FP8"), {}, False),
        (
            "fp8, one scale",
            {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
            {},
            True,
        ),
        (
            "fp8, one scale",
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
            {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"},
            False,
        ),
        ("fp8 dynamic", modelopt("FP8_PER_CHANNEL_PER_TOKEN"), {}, False),
        ("fp8 blocks", modelopt("FP8_PB"), {}, False),
        ("fp8 blocks of compressed-tensors", modelopt("fp8_pb_wo"), {}, False),
        ("mxfp8", modelopt("MXFP8"), {}, False),
    ],
    ids=["one scale", "in a file of its own", "Ministral 3", "by output", "blocks", "blocks of weights", "mxfp8"],
)
def test_floats_of_8_bits_are_read_as_others_publish_them(
    tmp_path: Path, code: Implementation, form: str, method: dict[str, Any], names: dict[str, str], apart: bool
) -> None:
    quantized, _ = write_both(tmp_path, FORMATS[form])
    expected = logits(Checkpoint.open(quantized, code).load(torch.float32, CPU, "stored"))
    tensors = load_file(quantized / "model.safetensors")
    if apart:
        (tmp_path / "published").mkdir()
        (tmp_path / "published" / "hf_quant_config.json").write_text(json.dumps({"quantization": method}))
    if method.get("quant_algo") == "FP8_PER_CHANNEL_PER_TOKEN":
        tensors = {name: each[:, 0] if name.endswith("weight_scale") else each for name, each in tensors.items()}
    if method.get("quant_algo") == "fp8_pb_wo":  # with dimensions of one between those of the blocks
        tensors = {name: each[:, None, :, None] if "scale" in name else each for name, each in tensors.items()}
    renamed = {".".join(names.get(part, part) for part in name.split(".")): each for name, each in tensors.items()}
    published = write(tmp_path / "published", renamed, quantization_config=None if apart else method)
    assert torch.equal(logits(Checkpoint.open(published, code).load(torch.float32, CPU, "stored")), expected)
    counted = [ModelShape.from_folder(folder).weights_bytes("float32", "stored") for folder in (published, quantized)]
    assert counted[0] == counted[1]


@both_codes
@pytest.mark.parametrize(
    ("form", "name", "method"),
    [
        ("gptq, reordered", "quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": True, "sym": True}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_a_file_beside_config_json_may_say_how_a_checkpoint_is_quantised(
    tmp_path: Path, code: Implementation, form: str, name: str, method: dict[str, Any]
) -> None:
    """As AutoGPTQ and AutoAWQ wrote it first."""
    folder, _ = write_both(tmp_path, FORMATS[form])
    config = folder / "config.json"

    def figures() -> tuple[torch.Tensor, int]:
        model = Checkpoint.open(folder, code).load(torch.float32, CPU, "stored")
        return logits(model), ModelShape.from_folder(folder).weights_bytes("float32", "stored")

    expected, size = figures()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": None}))
    (folder / name).write_text(json.dumps(method))
    assert torch.equal(figures()[0], expected)
    assert figures()[1] == size


@both_codes
def test_layers_that_model_optimizer_quantises_differently(tmp_path: Path, code: Implementation) -> None:
    stored, exact, layers = {}, {}, {}
    for name, tensor in dense_tensors().items():
        module, kind = name.removesuffix(".weight"), "FP8" if "self_attn" in name else "W4A16_NVFP4"
        stored[name] = exact[name] = tensor
        if module.endswith("_proj") and ".1." in module:  # the first layer is dense
            form = FORMATS["fp8, one scale" if kind == "FP8" else "nvfp4 of Model Optimizer"]
            tensors, exact[name] = form.quantize(stored.pop(name))
            stored |= {f"{module}.{suffix}": each for suffix, each in tensors.items()}
            layers[f"model.language_model.{module.removeprefix('model.')}"] = {"quant_algo": kind}
    method = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    quantized = write(tmp_path / "quantized", stored, quantization_config=method)
    ours, reference = (Checkpoint.open(each, code) for each in (quantized, write(tmp_path / "exact", exact)))
    assert torch.equal(*(logits(each.load(torch.float32, CPU, "dense")) for each in (ours, reference)))
    predicted = ModelShape.from_folder(quantized).weights_bytes("float32", "stored")
    assert ours.load(torch.float32, CPU, "stored").weight_bytes == pytest.approx(predicted, rel=0.01)


def test_scales_of_nf4_may_be_stored_as_they_are(tmp_path: Path) -> None:
    quantized, exact = write_both(tmp_path, FORMATS["nf4"])
    tensors, dense = load_file(quantized / "model.safetensors"), load_file(exact / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".absmax")]:
        matrix, table = dense[name.removesuffix(".absmax")], tensors[name.replace("absmax", "quant_map")]
        codes = tensors[name.removesuffix(".absmax")].view(-1, 32)
        numbers = table[torch.stack((codes >> 4, codes & 0xF), -1).int()].flatten(1)
        largest = numbers.abs().argmax(1, keepdim=True)
        scales = matrix.view(-1, 64).gather(1, largest) / numbers.gather(1, largest)
        tensors[name] = scales.flatten()
        for part in ("nested_absmax", "nested_quant_map"):
            del tensors[name.replace("absmax", part)]
        dense[name.removesuffix(".absmax")] = (numbers * scales).view(matrix.shape)
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    save_file(dense, exact / "model.safetensors", {"format": "pt"})
    ours, expected = (Checkpoint.open(each).load(torch.float32, CPU, "dense") for each in (quantized, exact))
    assert torch.equal(logits(ours), logits(expected))


@both_codes
def test_layers_that_gptqmodel_quantises_differently(tmp_path: Path, code: Implementation) -> None:
    """As it does with the head, where `lm_head` is set."""
    stored, exact = {}, {}
    for name, tensor in dense_tensors().items():
        module = name.removesuffix(".weight")
        stored[name] = exact[name] = tensor
        if module.endswith("_proj") or module == "lm_head":
            form = FORMATS["gptq, 8 bits" if module == "lm_head" or "down_proj" in module else "gptq"]
            tensors, exact[name] = form.quantize(stored.pop(name))
            stored |= {f"{module}.{suffix}": each for suffix, each in tensors.items()}
    method = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "lm_head": True}
    method["dynamic"] = {rule: {"bits": 8, "group_size": -1} for rule in (r"+:.*\.down_proj$", "lm_head")}
    quantized = write(tmp_path / "quantized", stored, quantization_config=method)
    expected = logits(loaded(write(tmp_path / "exact", exact), "dense", code=code))
    ours = loaded(quantized, "stored", code=code)
    assert relative_error(logits(ours), expected) < 1e-3


@pytest.mark.parametrize("family", ["phi3, fused matrices", "glm4"])
def test_gate_and_up_that_gptqmodel_stores_apart(tmp_path: Path, family: str) -> None:
    """Which are one matrix in transformers' model."""
    folder, expected = (tmp_path / name for name in ("apart", "together"))
    for each in (folder, expected):
        write_family(each, family, FORMATS["gptq"])
    stored = load_file(folder / "model.safetensors")
    for name in [each for each in stored if ".gate_up_proj." in each]:
        tensor = stored.pop(name)
        halves = [tensor, tensor] if name.endswith("g_idx") else tensor.chunk(2, dim=1)
        for part, half in zip(("gate_proj", "up_proj"), halves, strict=True):
            stored[name.replace("gate_up_proj", part)] = half.clone()
    save_file(stored, folder / "model.safetensors")
    ours, model = (loaded(each, "stored", code="transformers") for each in (folder, expected))
    assert torch.equal(logits(ours), logits(model))
    planned = ModelShape.from_folder(folder).weights_bytes("float32", "stored")
    assert ours.weight_bytes == model.weight_bytes == pytest.approx(planned, rel=0.01)


@both_codes
@pytest.mark.parametrize("storage", [torch.int8, torch.float16, torch.bfloat16, torch.float32])
def test_nf4_may_be_stored_as_another_dtype(tmp_path: Path, code: Implementation, storage: torch.dtype) -> None:
    quantized, _ = write_both(tmp_path, FORMATS["nf4"])
    expected = Checkpoint.open(quantized, code).load(torch.float32, CPU, "stored")
    tensors = load_file(quantized / "model.safetensors")
    for name in [name for name in tensors if f"{name}.absmax" in tensors]:
        tensors[name] = tensors[name].flatten().view(storage)[:, None]
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    ours = Checkpoint.open(quantized, code).load(torch.float32, CPU, "stored")
    assert torch.equal(logits(ours), logits(expected))
    predicted = ModelShape.from_folder(quantized).weights_bytes("float32", "stored")
    assert ours.weight_bytes == pytest.approx(predicted, rel=0.01)


def test_4_bits_may_be_those_of_fp4(tmp_path: Path) -> None:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
    quantized, exact = write_both(tmp_path, Format(config, fp4))
    ours, expected = (Checkpoint.open(each).load(torch.float32, CPU, "dense") for each in (quantized, exact))
    assert torch.equal(logits(ours), logits(expected))
    predicted = ModelShape.from_folder(quantized).weights_bytes("float32", "stored")
    assert Checkpoint.open(quantized).load(torch.float32, CPU, "stored").weight_bytes == pytest.approx(
        predicted, rel=0.01
    )


def test_block_scales_may_be_powers_of_two_in_8_bits(tmp_path: Path) -> None:
    quantized, _ = write_both(tmp_path, FORMATS["fp8 blocks"])
    tensors = load_file(quantized / "model.safetensors")
    scales = {name: each.to(torch.float8_e8m0fnu) for name, each in tensors.items() if name.endswith("scale_inv")}
    save_file(tensors | scales, quantized / "model.safetensors", {"format": "pt"})
    model = Checkpoint.open(quantized).load(torch.float32, CPU, "dense")
    values, scale = tensors[f"{Q_PROJ}.weight"].float(), scales[f"{Q_PROJ}.weight_scale_inv"].float()
    expected = values * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(model.layers[1].attention.qkv.weight[:256], expected)  # type: ignore[union-attr]


SCALES_OF_ATTENTION = (
    *("k_scale", "v_scale", "kv_scale", "q_scale", "prob_output_scale"),
    *("q_proj.q_scale", "k_proj.k_scale", "v_proj.v_scale"),
    *(f"{each}_proj.output_scale" for each in "qkv"),
)


@both_codes
def test_scales_of_quantised_attention_are_left_out(tmp_path: Path, code: Implementation) -> None:
    quantized, _ = write_both(tmp_path, FORMATS["fp8 static"])
    expected = logits(Checkpoint.open(quantized, code).load(torch.float32, CPU, "stored"))
    tensors = load_file(quantized / "model.safetensors")
    scales = {f"model.layers.1.self_attn.{each}": torch.tensor(0.5) for each in SCALES_OF_ATTENTION}
    scales["model.layers.1.self_attn.q_zero_point"] = torch.zeros(1).to(torch.float8_e4m3fn)
    save_file(tensors | scales, quantized / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(Checkpoint.open(quantized, code).load(torch.float32, CPU, "stored")), expected)


@both_codes
@pytest.mark.parametrize(
    ("form", "suffix", "zeros"),
    [
        ("gptq", "bias", torch.zeros(256)),  # AutoGPTQ writes one for every matrix
        ("fp8 static", "input_zero_point", torch.zeros(1).to(torch.float8_e4m3fn)),
    ],
)
def test_what_the_model_has_no_place_for_is_left_out_only_if_it_is_zero(
    tmp_path: Path, form: str, suffix: str, zeros: torch.Tensor, code: Implementation
) -> None:
    folder, _ = write_both(tmp_path, FORMATS[form])
    expected = logits(Checkpoint.open(folder, code).load(torch.float32, CPU, "stored"))
    tensors, name = load_file(folder / "model.safetensors"), f"model.layers.1.self_attn.o_proj.{suffix}"
    save_file(tensors | {name: zeros}, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(Checkpoint.open(folder, code).load(torch.float32, CPU, "stored")), expected)
    save_file(tensors | {name: zeros.float() + 1}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"{name}, which Qwen2ForCausalLM .* has no place for"):
        Checkpoint.open(folder, code).load(torch.float32, CPU)


@needs_vnni
@pytest.mark.parametrize("name", ["W8A8 int8", None])
def test_transformers_code_computes_products_of_8_bits(tmp_path: Path, name: str | None) -> None:
    """Of a checkpoint that is quantised, and of one that is quantised at load."""
    quantized, exact = write_both(tmp_path, FORMATS["W8A8 int8"])
    settings = ("int8", torch.float32) if name is None else ("auto", torch.float32)
    folder = exact if name is None else quantized
    ours, same = (loaded(folder, *settings, code=code) for code in ("transformers", "own"))
    kinds = [type(linear) for linear in ours.linears()]
    assert kinds.count(Int8Linear) == len(kinds) - (name is not None)  # the head of a checkpoint is not quantised
    assert relative_error(logits(ours), logits(same)) < 0.05


def test_int8_is_refused_where_its_products_are_slow(tmp_path: Path) -> None:
    plain = write(tmp_path, dense_tensors())
    with pytest.raises(ConfigError, match="the backend torch has no fast product of 8-bit integers"):
        start(EngineConfig(model=plain, device="cpu", attention="torch", quantization="int8"))


def test_parts_with_blocks_across_their_borders_are_fused() -> None:
    random = torch.Generator().manual_seed(0)
    parts = [
        QuantizedWeight(
            torch.randn(outputs, 192, generator=random).to(torch.float8_e4m3fn),
            torch.rand(-(-outputs // 128), 2, generator=random),
            rows=128,
            group=128,
        )
        for outputs in (192, 64)
    ]
    expected = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(fuse(parts).dequantize(torch.float32), expected)


def test_some_outputs_of_a_matrix_keep_no_memory_of_the_others() -> None:
    whole = QuantizedWeight.int8(torch.randn(192, 64))
    some = whole.outputs(64, 128)
    assert torch.equal(some.dequantize(torch.float32), whole.dequantize(torch.float32)[64:128])
    assert some.nbytes == some.values.untyped_storage().nbytes() + some.scales.untyped_storage().nbytes()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@each_format
def test_the_planner_predicts_the_measured_weights(tmp_path: Path, name: str, quantization: Quantization) -> None:
    folder, _ = write_both(tmp_path, FORMATS[name])
    shape = ModelShape.from_folder(folder)
    if WeightFormat.parse(shape.quantization).held_as(quantization, on_cpu=True) == "int8" and not HAS_QUAD_PRODUCT:
        pytest.skip("this CPU multiplies no 8-bit integers, and holds such matrices dense")
    predicted = shape.weights_bytes("float32", quantization, on_cpu=True)
    assert loaded(folder, quantization).weight_bytes == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("quantization", ["auto", "stored", "dense"])
@pytest.mark.parametrize(
    ("pattern", "of_these", "of_others"),
    [
        ("self_attn", "W8A16", "W4A16"),
        ("self_attn", "fp8 dynamic", "nvfp4"),
        ("down_proj", "fp8 dynamic", "W4A16"),
        ("q_proj", "W8A16", "W4A16"),  # keys and values cannot be fused with it
    ],
)
def test_the_planner_predicts_a_mixture_of_formats(
    tmp_path: Path, pattern: str, of_these: str, of_others: str, quantization: Quantization
) -> None:
    forms = {rf"re:.*{pattern}": FORMATS[of_these], "Linear": FORMATS[of_others]}
    groups = {
        target: {**form.config["config_groups"]["group_0"], "format": form.config["format"], "targets": [target]}
        for target, form in forms.items()
    }
    stored = dense_tensors()
    for name in [each for each in stored if each.endswith("_proj.weight")]:
        tensors, _ = forms[f"re:.*{pattern}" if pattern in name else "Linear"].quantize(stored.pop(name))
        stored.update({f"{name.removesuffix('weight')}{suffix}": each for suffix, each in tensors.items()})
    method = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    folder = write(tmp_path / "quantized", stored, quantization_config={**method, "ignore": ["lm_head"]})
    predicted = ModelShape.from_folder(folder).weights_bytes("float32", quantization, on_cpu=True)
    assert loaded(folder, quantization).weight_bytes == pytest.approx(predicted, rel=0.01)


@both_codes
def test_4_bits_beside_activations_in_fp8_are_multiplied_with_activations_as_they_are(
    tmp_path: Path, code: Implementation
) -> None:
    form = FORMATS["W4A16"]
    group = form.config["config_groups"]["group_0"] | {"input_activations": {**TOKEN, "type": "float"}}
    config = {**form.config, "config_groups": {"group_0": group}}
    quantized, exact = write_both(tmp_path, replace(form, config=config))
    ours, expected = loaded(quantized, "stored", code=code), loaded(exact, "dense")
    assert relative_error(logits(ours), logits(expected)) < 1e-5


@pytest.mark.parametrize(("sizes", "name"), [({"k_proj": 192, "v_proj": 128}, "fp8 blocks"), ({"k_proj": 96}, "nvfp4")])
def test_matrices_of_odd_sizes_are_counted_as_they_are_held(sizes: dict[str, int], name: str) -> None:
    """Blocks across the borders of fused parts, and outputs that a CPU's products do not take."""
    tensors, parts = {}, []
    config = {"quantization_config": FORMATS[name].config}
    quantization = read_quantization(config)
    assert quantization is not None
    for part, outputs in sizes.items():
        module = f"model.layers.0.self_attn.{part}"
        whole, _ = FORMATS[name].quantize(torch.randn(256, 256))
        made = {
            each: part[: -(-outputs * len(part) // 256)] if part.ndim == 2 else part for each, part in whole.items()
        }
        kinds = {torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}
        for suffix, tensor in made.items():
            tensors[f"{module}.{suffix}"] = StoredTensor(kinds[tensor.dtype], (*tensor.shape,), tensor.nbytes)
        parts.append(read(quantization.main, module, made, (outputs, 256)))
    counts = WeightCounts.of(tensors, quantization, layers=1, hidden_size=256, tied=True, is_own=True)
    assert counts.held_bytes("stored", on_cpu=True, dtype_bytes=2) == fuse(parts).nbytes
    kept = int4.can_multiply(fuse(parts))
    assert counts.held_bytes("auto", on_cpu=True, dtype_bytes=2) == (
        fuse(parts).nbytes if kept else 2 * 256 * sum(sizes.values())
    )


LARGER = {  # than those that are compared with transformers: formats have groups of 128 inputs
    **{key: CONFIG[key] for key in ("vocab_size", "hidden_size", "intermediate_size")},
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "ffn_dim": 384,
    "word_embed_proj_dim": 256,
}
LARGER_WHERE_SET = {
    "d_model": CONFIG["hidden_size"],
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "v_head_dim": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "hidden_size_per_layer_input": 128,
    "shared_intermediate_size": 384,
}


def write_family(folder: Path, family: str, form: Format | None, left_out: str = ".gate") -> Path:
    """A checkpoint of transformers' code; the matrices of its layers are quantised, except routers and small ones.

    Also except those whose names end with `left_out`.
    """
    model = (FAMILIES | OTHERS)[family]
    settings = model.settings
    larger = LARGER | {key: size for key, size in LARGER_WHERE_SET.items() if settings.get(key)}
    if "kv_lora_rank" in settings:
        del larger["head_dim"]  # else that of all numbers that turn, or of all of a query
        if rotated := settings.get("head_dim", 0) // settings["qk_rope_head_dim"]:
            larger["head_dim"] = rotated * larger["qk_rope_head_dim"]
    save(replace(model, shard="1GB"), folder, **larger)
    if form is None:
        return folder
    stored = load_file(folder / "model.safetensors")
    for name in [*stored]:
        module = name.removesuffix(".weight")
        is_matrix = name.endswith(".weight") and stored[name].ndim == 2 and re.search(r"\.\d+\.", name)
        if is_matrix and min(stored[name].shape) >= 64 and not module.endswith((".gate", ".router.layer", left_out)):
            matrix = stored.pop(name)  # transposed where transformers has it so, as quantised checkpoints do not
            tensors, _ = form.quantize(matrix.t().contiguous() if family == TRANSPOSED else matrix)
            stored.update({f"{module}.{suffix}": each for suffix, each in tensors.items()})
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": form.config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


DENSE, MIXTURE, TIED = "olmo2, norms after the layers", "glm4-moe", "cohere, parallel layers"
IN_ONE = "granite-moe"
"""Its checkpoints have all experts in one tensor."""
TRANSPOSED = "gpt2, learned positions and transposed matrices"
WITHOUT_WEIGHTS = "longcat-flash, latent attention twice in a layer, and experts without weights"
"""Its experts stay transformers' own, and dense, which the plan does not know: no GPU holds it (560 billion)."""
BY_LAYER, LATENTS = "gemma4, larger heads in layers without a window", "deepseek-v3, latent attention"


@pytest.mark.parametrize(
    ("family", "name", "quantization"),
    [
        *((MIXTURE, name, "stored") for name in FORMATS),  # a layer of it is dense
        *((family, "gptq, with zeros", "stored") for family in OTHERS if family not in (MIXTURE, WITHOUT_WEIGHTS)),
        *((family, "gptq", each) for family in (DENSE, MIXTURE) for each in QUANTIZATIONS if each != "stored"),
        *((family, None, "int8") for family in (DENSE, MIXTURE, IN_ONE, TIED, TRANSPOSED, BY_LAYER, LATENTS)),
    ],
)
def test_the_planner_predicts_the_weights_of_transformers_models(
    tmp_path: Path, family: str, name: str | None, quantization: Quantization
) -> None:
    """On a device that multiplies all formats."""
    folder = write_family(tmp_path, family, None if name is None else FORMATS[name])
    shape, checkpoint = ModelShape.from_folder(folder), Checkpoint.open(folder, "transformers")
    request = SizingRequest(shape=shape, device=gpu.find_gpu("h100"), max_model_len=64, quantization=quantization)
    held = checkpoint.held_bytes(torch.float32, quantization, on_cpu=False)  # without the copy of a tied head
    assert held == shape.weights_bytes("float32", quantization)
    measured = checkpoint.load(torch.float32, CPU, quantization, lambda _: True).weight_bytes
    assert measured == pytest.approx(plan(request).weights_bytes, rel=0.01)


OWN = {family.model_type: name for name, family in FAMILIES.items() if family.model_type != "gpt_oss"}
"""A family of each kind; gpt-oss has its experts in one tensor."""


@pytest.mark.parametrize("name", ["gptq, with zeros", "nvfp4 of Model Optimizer"])
@pytest.mark.parametrize("family", OWN.values())
def test_every_kind_of_our_own_is_quantised_as_planned(tmp_path: Path, family: str, name: str) -> None:
    folder = write_family(tmp_path, family, FORMATS[name])
    predicted = ModelShape.from_folder(folder).weights_bytes("float32", "stored", on_cpu=True)
    measured = Checkpoint.open(folder).load(torch.float32, CPU, "stored").weight_bytes  # without a tied head's copy
    assert measured == pytest.approx(predicted, rel=0.01)
    ours, expected = (loaded(folder, each) for each in ("stored", "dense"))
    assert relative_error(logits(ours), logits(expected)) < 1e-3


@pytest.mark.parametrize("family", [DENSE, MIXTURE, TIED])
def test_the_planner_predicts_what_a_cpu_holds_of_transformers_models(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family, FORMATS["gptq"])
    request = SizingRequest(shape=ModelShape.from_folder(folder), device=gpu.CPU(1 << 30), max_model_len=64)
    measured = loaded(folder, "auto", code="transformers").weight_bytes
    assert measured == pytest.approx(plan(request).weights_bytes, rel=0.01)


@pytest.mark.parametrize("family", ["olmoe", "qwen3-moe"])
def test_a_dense_expert_beside_quantised_ones_keeps_no_memory_of_these(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, family, FORMATS["gptq"], left_out="experts.0.down_proj")
    model = Checkpoint.open(folder).load(torch.float32, CPU, "stored")
    dense = [mixture.experts.down[0].weight for mixture in model.mixtures()]
    assert [each.untyped_storage().nbytes() for each in dense] == [each.nbytes for each in dense]


Change = Callable[[Tensors, dict[str, Any]], object]


def without(suffix: str) -> Change:
    return lambda tensors, config: tensors.pop(f"{Q_PROJ}.{suffix}")


def reshaped(suffix: str) -> Change:
    name = f"{Q_PROJ}.{suffix}"
    return lambda tensors, config: tensors.update({name: tensors[name][:-1]})


def changed(**settings: Any) -> Change:
    return lambda tensors, config: config.update(settings)


def with_state(text: str) -> Change:
    state = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return lambda tensors, config: tensors.update({f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4": state})


BROKEN: dict[str, tuple[str, Change, str]] = {
    "an unknown method": ("awq", changed(quant_method="exl2"), "quantised by 'exl2', supported are compressed-tensors"),
    "an unknown version": ("awq", changed(version="gemv"), "version is 'gemv', expected gemm"),
    "3 bits": ("gptq", changed(bits=3), "bits is 3, expected 4 or 8"),
    "a group that does not fit": ("gptq", changed(group_size=96), "inputs are no multiple of a group's 96"),
    "groups of another size": (
        "gptq",
        changed(group_size=64),
        r"qzeros has the shape \[2, 32\], .* makes it \[4, 32\]",
    ),
    "missing scales": ("gptq", without("scales"), f"has no {Q_PROJ}.scales, which gptq .* needs"),
    "a missing scale of the matrix": (
        "nvfp4",
        without("weight_global_scale"),
        f"has no {Q_PROJ}.weight_global_scale, which compressed-tensors .fp4, groups of 16. needs",
    ),
    "a scale of the matrix that is zero": (
        "nvfp4",
        lambda tensors, config: tensors.update({f"{Q_PROJ}.weight_global_scale": torch.zeros(1)}),
        f"{Q_PROJ}: its scales are negative, infinite or no numbers",
    ),
    "a scale of a group that is negative": (
        "nvfp4 of Model Optimizer",
        lambda tensors, config: tensors.update(
            {f"{Q_PROJ}.weight_scale": tensors[f"{Q_PROJ}.weight_scale"].float().neg().to(torch.float8_e4m3fn)}
        ),
        f"{Q_PROJ}: its scales are negative, infinite or no numbers",
    ),
    "NF4 without what it says of a matrix": (
        "nf4",
        without("weight.quant_state.bitsandbytes__nf4"),
        f"{Q_PROJ}: it has no weight.quant_state.bitsandbytes__nf4",
    ),
    "8-bit integers in another order": (
        "int8 of bitsandbytes",
        lambda tensors, config: tensors.update({f"{Q_PROJ}.weight_format": torch.tensor(2, dtype=torch.uint8)}),
        f"{Q_PROJ}: its integers are in the order of a GPU's tiles",
    ),
    "NF4 that says something else": ("nf4", with_state("{}"), "is not as expected: Object missing required field"),
    "NF4 in other groups": (
        "nf4",
        with_state('{"shape": [256, 256], "blocksize": 128}'),
        r"said to be \[256, 256\] in groups of 128, expected \[256, 256\] and 64",
    ),
    "missing block scales": ("fp8 blocks", without("weight_scale_inv"), f"has no {Q_PROJ}.weight_scale, which fp8"),
    "a wrong shape": ("awq", reshaped("qweight"), r"qweight has the shape \[255, 32\], .* makes it \[256, 32\]"),
    "a wrong dtype": (
        "fp8 blocks",
        lambda tensors, config: tensors.update({f"{Q_PROJ}.weight": tensors[f"{Q_PROJ}.weight"].view(torch.int8)}),
        "weight is torch.int8, .* makes it float8_e4m3fn",
    ),
    "no format at all": ("gptq", lambda tensors, config: config.clear(), "q_proj is quantised .*does not say"),
    "embeddings": (
        "W8A16",
        lambda tensors, config: tensors.update(
            {
                f"model.embed_tokens.{suffix}": each
                for suffix, each in FORMATS["W8A16"].quantize(tensors.pop("model.embed_tokens.weight"))[0].items()
            }
        ),
        "model.embed_tokens is quantised, which is served of linear layers only",
    ),
    "a part with another order": (
        "gptq",
        lambda tensors, config: tensors.update({f"{Q_PROJ}.g_idx": tensors[f"{Q_PROJ}.g_idx"] * 0}),
        "g_idx does not give each group 128 inputs",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    form, change, message = BROKEN[name]
    folder, _ = write_both(tmp_path, FORMATS[form])
    from safetensors.torch import load_file

    tensors, config = load_file(folder / "model.safetensors"), dict(FORMATS[form].config)
    change(tensors, config)
    write(folder, tensors, quantization_config=config)
    with pytest.raises(ModelLoadError, match=message):
        Checkpoint.open(folder).load(torch.float32, CPU)
