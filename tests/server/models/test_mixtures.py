import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from llmservice_planner.model.shape import ModelShape
from llmservice_server.backend.experts import ExpertsMlp, stack_of
from llmservice_server.backend.layers import DecoderLayer
from llmservice_server.backend.quantized import QuantizedLinear
from llmservice_server.backend.torch.layer_ops import TorchLinear
from llmservice_server.models.decoder import DecoderModel
from llmservice_server.runtime.loader import Checkpoint
from llmservice_server.types.errors import ModelLoadError

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 193,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
QWEN: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**QWEN, "head_dim": 16, "mlp_only_layers": [0]},
}
each_mixture = pytest.mark.parametrize("model_type", MIXTURES)


def write(folder: Path, model_type: str) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | MIXTURES[model_type])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> DecoderModel:
    model = Checkpoint.open(folder).load(torch.float32, CPU)
    assert isinstance(model, DecoderModel)
    return model


def mlp_of(layer: DecoderLayer) -> ExpertsMlp:
    assert isinstance(layer.mlp, ExpertsMlp)
    return layer.mlp


def test_experts_of_mixtral_may_have_the_names_of_other_families(tmp_path: Path) -> None:
    """As llmcompressor writes them."""
    folder = write(tmp_path, "mixtral")
    expected = load(folder)
    stored = load_file(folder / "model.safetensors")
    for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        stored = {name.replace(f".{old}.", f".{new}."): tensor for name, tensor in stored.items()}
    assert "model.layers.0.block_sparse_moe.experts.3.up_proj.weight" in stored
    save_file(stored, folder / "model.safetensors")
    renamed = load(folder)
    for ours, theirs in zip(renamed.linears(), expected.linears(), strict=True):
        assert torch.equal(ours.weight, theirs.weight)
    for one, other in zip(renamed.mixtures(), expected.mixtures(), strict=True):
        for parts in ("gate_up", "down"):
            assert torch.equal(*(stack_of(getattr(each.experts, parts)) for each in (one, other)))


@each_mixture
def test_the_planner_predicts_the_weights_in_memory(tmp_path: Path, model_type: str) -> None:
    folder = write(tmp_path, model_type)
    predicted = ModelShape.from_folder(folder).weights_bytes("float32")
    assert load(folder).weight_bytes == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize(
    ("model_type", "module", "names"),
    [
        ("mixtral", "block_sparse_moe.experts", ("w1", "w3", "w2")),
        ("qwen3_moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_all_experts_in_one_tensor_are_the_same_model(
    tmp_path: Path, model_type: str, module: str, names: tuple[str, str, str]
) -> None:
    folder = write(tmp_path, model_type)
    expected = mlp_of(load(folder).layers[1])
    tensors = load_file(folder / "model.safetensors")
    for layer in range(SIZES["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.{module}"
        gate, up, down = (
            [tensors.pop(f"{prefix}.{expert}.{name}.weight", None) for expert in range(4)] for name in names
        )
        if all(each is not None for each in (*gate, *up, *down)):
            fused = f"model.layers.{layer}.mlp.experts"
            tensors[f"{fused}.gate_up_proj"] = torch.cat((torch.stack(gate), torch.stack(up)), 1)  # type: ignore[arg-type]
            tensors[f"{fused}.down_proj"] = torch.stack(down)  # type: ignore[arg-type]
            router = tensors.pop(f"{prefix.removesuffix('.experts')}.gate.weight")
            tensors[f"model.layers.{layer}.mlp.gate.weight"] = router
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fused_mlp = mlp_of(load(folder).layers[1])
    for ours, theirs in (
        (fused_mlp.experts.gate_up, expected.experts.gate_up),
        (fused_mlp.experts.down, expected.experts.down),
    ):
        assert torch.equal(torch.stack([each.weight for each in ours]), torch.stack([each.weight for each in theirs]))
        assert stack_of(ours) is not None
        assert stack_of(theirs) is not None
    assert torch.equal(fused_mlp.router.weight, expected.router.weight)


def test_quantised_experts_are_read_one_by_one(tmp_path: Path) -> None:
    """As in Qwen3-30B-A3B-FP8: 8-bit floats with a scale for each block; the router is not quantised."""
    folder = write(tmp_path, "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    exact = {}
    for name in [name for name in tensors if ".experts." in name]:
        values, scale = (100 * tensors.pop(name)).to(torch.float8_e4m3fn), torch.rand(1, 1)
        tensors[name], tensors[name.replace("weight", "weight_scale_inv")] = values, scale
        exact[name] = values.float() * scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    for quantization, kind in (("dense", TorchLinear), ("stored", QuantizedLinear)):
        model = Checkpoint.open(folder).load(torch.float32, CPU, quantization)  # type: ignore[arg-type]
        assert isinstance(model, DecoderModel)
        experts = mlp_of(model.layers[1]).experts
        for expert, linear in enumerate(experts.down):
            assert isinstance(linear, kind)
            weight = (
                linear.quantized.dequantize(torch.float32) if isinstance(linear, QuantizedLinear) else linear.weight
            )
            assert torch.equal(weight, exact[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"])


def test_more_experts_for_a_token_than_there_are_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "mixtral")
    config = json.loads((folder / "config.json").read_text()) | {"num_experts_per_tok": 5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="num_experts_per_tok is 5, expected 1 to 4, the number of experts"):
        Checkpoint.open(folder)
