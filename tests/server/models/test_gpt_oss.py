import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from harness.checkpoints.quantized import (
    GPT_OSS_EXPERTS,
    GPT_OSS_HIDDEN,
    GPT_OSS_LAYERS,
    GPT_OSS_WIDTH,
    mxfp4_experts,
    write_gpt_oss,
)
from llmservice_planner.model.quantization import Quantization
from llmservice_planner.model.shape import ModelShape, ShapeError
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cpu import int4
from llmservice_server.backend.cpu.backend import CpuBackend
from llmservice_server.backend.cpu.experts import CpuExperts
from llmservice_server.backend.cuda.backend import CudaBackend
from llmservice_server.backend.cuda.experts import CudaExperts
from llmservice_server.backend.experts import Experts, ExpertsMlp, stack_of
from llmservice_server.backend.torch.layer_ops import TorchLayerOps
from llmservice_server.models.decoder import DecoderModel
from llmservice_server.runtime.loader import Checkpoint
from llmservice_server.types.errors import ModelLoadError

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_gpt_oss(tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture
def dense(both: tuple[Path, Path]) -> Path:
    return both[1]


@pytest.fixture
def mxfp4(both: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return shutil.copytree(both[0], tmp_path / "mxfp4")


def load(folder: Path, dtype: torch.dtype) -> DecoderModel:
    model = Checkpoint.open(folder).load(dtype, CPU)
    assert isinstance(model, DecoderModel)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_is_dequantised_to_the_numbers_of_transformers(dense: Path, mxfp4: Path, dtype: torch.dtype) -> None:
    for ours, theirs in zip(load(mxfp4, dtype).layers, load(dense, dtype).layers, strict=True):
        assert isinstance(ours.mlp, ExpertsMlp)
        assert isinstance(theirs.mlp, ExpertsMlp)
        for name in ("gate_up", "down"):
            matrices = zip(getattr(ours.mlp.experts, name), getattr(theirs.mlp.experts, name), strict=True)
            assert all(torch.equal(one.weight, other.weight) for one, other in matrices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gate_and_up_are_apart_and_their_biases_too(mxfp4: Path, dtype: torch.dtype) -> None:
    mlp = load(mxfp4, dtype).layers[1].mlp
    assert isinstance(mlp, ExpertsMlp)
    blocks, scales = mxfp4_experts()["model.layers.1.mlp.experts.gate_up_proj"]
    stored = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    biases = load_file(mxfp4 / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj_bias"].to(dtype)
    for expert, linear in enumerate(mlp.experts.gate_up):
        assert torch.equal(linear.weight, torch.cat((stored[expert, ::2], stored[expert, 1::2])))
        assert linear.bias is not None
        assert torch.equal(linear.bias, torch.cat((biases[expert, ::2], biases[expert, 1::2])))


@pytest.mark.parametrize("quantization", ["auto", "dense"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bytes_of_weights_are_predicted(mxfp4: Path, dtype: str, quantization: Quantization) -> None:
    """On a CPU, as they are stored, and dense."""
    checkpoint, kind = Checkpoint.open(mxfp4), getattr(torch, dtype)
    measured = checkpoint.load(kind, CPU, quantization, int4.can_multiply).weight_bytes
    planned = ModelShape.from_folder(mxfp4).weights_bytes(dtype, quantization, on_cpu=True)
    assert planned == pytest.approx(measured, rel=0.01)
    assert checkpoint.held_bytes(kind, quantization, on_cpu=True) == planned


@pytest.mark.parametrize(("kind", "experts"), [(CudaBackend, CudaExperts), (CpuBackend, CpuExperts)])
def test_a_device_multiplies_the_stored_numbers(mxfp4: Path, kind: type[Any], experts: type[Experts]) -> None:
    """With our kernels, those of a GPU in Triton's interpreter; compared with dense weights."""
    shape = KVCacheShape(4, 2, 16, (None,) * GPT_OSS_LAYERS, 16, torch.float32)
    backend = kind(shape, CPU, "a test", **({"worth_compiling": True} if kind is CpuBackend else {}))
    model = Checkpoint.open(mxfp4).load(torch.float32, CPU, "auto", backend.keeps)
    backend.prepare(model)
    assert not backend.fallbacks
    hidden = torch.randn(7, GPT_OSS_HIDDEN, generator=torch.Generator().manual_seed(2))
    assert isinstance(model, DecoderModel)
    for ours, dense in zip(model.layers, load(mxfp4, torch.float32).layers, strict=True):
        assert isinstance(ours.mlp, ExpertsMlp)
        assert isinstance(ours.mlp.experts, experts)
        expected = dense.mlp(hidden, TorchLayerOps())
        assert (ours.mlp(hidden, model.ops) - expected).norm() < 1e-5 * expected.norm()


def test_dense_experts_are_parts_of_one_tensor(mxfp4: Path) -> None:
    """As the product of all experts on a GPU takes them."""
    model = Checkpoint.open(mxfp4).load(torch.float32, CPU, "dense")
    assert isinstance(model, DecoderModel)
    assert isinstance(mlp := model.layers[0].mlp, ExpertsMlp)
    assert stack_of(mlp.experts.gate_up) is not None


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            None,
            "1 tensors that GptOssForCausalLM needs are in none of its 1 safetensors files, among them .*down_proj_sca",
        ),
        (
            torch.zeros(GPT_OSS_EXPERTS, GPT_OSS_HIDDEN, 2, dtype=torch.uint8),
            r"down_proj_scales has the shape \[4, 64, 2\], config.json",
        ),
        (
            torch.zeros(GPT_OSS_EXPERTS, GPT_OSS_HIDDEN, GPT_OSS_WIDTH // 32),
            "experts in mxfp4 are torch.uint8 with scales in torch.float32, expected uint8",
        ),
    ],
)
def test_wrong_tensors_are_refused(mxfp4: Path, tensor: torch.Tensor | None, message: str) -> None:
    change(mxfp4, "model.layers.0.mlp.experts.down_proj_scales", tensor)
    with pytest.raises(ModelLoadError, match=message):
        load(mxfp4, torch.float32)


def test_int8_is_refused(mxfp4: Path) -> None:
    with pytest.raises(ModelLoadError, match="quantization is int8, which is not for GptOssForCausalLM"):
        Checkpoint.open(mxfp4).load(torch.float32, CPU, "int8")


def test_a_module_for_each_expert_is_refused(dense: Path, tmp_path: Path) -> None:
    """As llmcompressor writes it; neither the server nor the plan takes it."""
    folder = shutil.copytree(dense, tmp_path / "apart")
    change(folder, "model.layers.0.mlp.experts.3.up_proj.weight_packed", torch.zeros(128, 8, dtype=torch.int32))
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**method, "config_groups": {"group_0": {"weights": weights}}}
    (folder / "config.json").write_text(json.dumps(config))
    message = "experts.3.up_proj.weight_packed is of one expert"
    with pytest.raises(ModelLoadError, match=message):
        load(folder, torch.float32)
    with pytest.raises(ShapeError, match=message):
        ModelShape.from_folder(folder)
