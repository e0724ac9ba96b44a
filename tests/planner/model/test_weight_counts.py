"""The weights of a checkpoint by its headers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmservice_planner.model.checkpoint import StoredTensor
from llmservice_planner.model.quantization_config import read_quantization
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.model.weight_counts import WeightCounts, has_head, place_of

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
PLAIN = {"model.embed_tokens.weight": (320, 256), "lm_head.weight": (320, 256), "model.norm.weight": (256,)}


def _tensors(*others: dict[str, tuple[int, ...]], **packed: str) -> dict[str, StoredTensor]:
    shapes = {name: shape for each in (PLAIN, *others) for name, shape in each.items()}
    found = {name: StoredTensor("BF16", shape, 0) for name, shape in shapes.items()}
    return found | {
        name: StoredTensor(packed.get(name.rpartition(".")[2], "BF16"), found[name].shape, 0) for name in found
    }


def _awq(module: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    shapes = {
        "qweight": (inputs, outputs // 8),
        "qzeros": (inputs // 64, outputs // 8),
        "scales": (inputs // 64, outputs),
    }
    return {f"{module}.{suffix}": shape for suffix, shape in shapes.items()}


def _counts(*others: dict[str, tuple[int, ...]], tied: bool = False, packed: bool = True) -> WeightCounts:
    tensors = _tensors(*others, qweight="I32", qzeros="I32", scales="F16")
    quantization = read_quantization({"quantization_config": AWQ if packed else None})
    return WeightCounts.of(tensors, quantization, layers=2, hidden_size=256, tied=tied)


EMBEDDINGS = 320 * 256


def test_packed_matrices_are_counted_by_the_numbers_in_them() -> None:
    counts = _counts(_awq("model.layers.0.mlp.up_proj", 384, 256))
    stored = 384 * 256 // 2 + 384 * 4 * (2 + 1)  # with a scale of 2 bytes and a zero of one for each group
    quantized = 384 * 256, 384, stored, stored, stored, 0
    assert counts == WeightCounts(*quantized, EMBEDDINGS, 320, EMBEDDINGS + 256, 384 + 320 + 2 * 256)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        *(
            pytest.param({f"model.layers.0.{router}.weight": (4, 256)}, 4 * 256, id=f"{router} is never quantised")
            for router in ("mlp.gate", "mlp.gate.wg", "router.proj", "router.layer")
        ),
        pytest.param(_awq("model.layers.2.mlp.up_proj", 384, 256), 0, id="a layer for further tokens"),
        pytest.param({"h.0.attn.bias": (1, 1, 64, 64)}, 0, id="a mask is not loaded"),
        pytest.param({"model.layers.0.mlp.up_proj.bias": (384,)}, 384, id="a bias"),
    ],
)
def test_what_is_held_in_the_dtype(others: dict[str, tuple[int, ...]], expected: int) -> None:
    counts, without = _counts(others), _counts()
    assert counts.other_parameters - without.other_parameters == expected
    assert counts.quantized_parameters == 0


def test_a_norm_with_a_row_for_each_head_is_no_matrix() -> None:
    """Cohere's of queries (Command R+)."""
    counts, without = _counts({"model.layers.0.self_attn.q_norm.weight": (4, 64)}), _counts()
    assert counts == replace(without, other_parameters=without.other_parameters + 4 * 64)


def test_experts_are_matrices_each_or_all_in_one_tensor() -> None:
    without = _counts()
    packed = _counts(_awq("model.layers.0.mlp.experts.3.w1", 128, 256))
    assert packed.quantized_parameters == 128 * 256
    assert packed.other_parameters == without.other_parameters
    for name in ("experts.gate_up_proj", "input_linear.weight"):
        stacked = _counts({f"model.layers.0.mlp.{name}": (4, 64, 256)})
        assert stacked.plain_parameters - without.plain_parameters == 4 * 64 * 256
        assert stacked.plain_outputs - without.plain_outputs == 4 * 64


@pytest.mark.parametrize(
    ("first", "second"),
    [("experts.gate_up_proj", "experts.down_proj"), ("experts.fc1.weight", "experts.fc2.weight")],  # the last of Aria
)
def test_the_first_matrix_of_experts_has_two_adapters_and_the_second_one(first: str, second: str) -> None:
    counts = _counts({f"model.layers.0.mlp.{first}": (4, 128, 256), f"model.layers.0.mlp.{second}": (4, 256, 64)})
    assert counts.expert_features == 4 * (2 * (128 + 256) + (256 + 64))


@pytest.mark.parametrize(
    ("in_checkpoint", "in_model"),
    [
        ("model.layers.3.block_sparse_moe.experts.17.w1", "model.layers.3.mlp.experts.17.gate_proj"),
        ("model.layers.3.mlp.experts.17.down_proj", "model.layers.3.mlp.experts.17.down_proj"),
        ("model.layers.3.block_sparse_moe.gate", "model.layers.3.mlp.gate"),
        ("model.language_model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("language_model.model.layers.0.mlp.experts.1.up_proj", "model.layers.0.mlp.experts.1.up_proj"),
        ("language_model.lm_head", "lm_head"),
    ],
)
def test_a_matrix_has_one_place_whatever_a_checkpoint_names_it(in_checkpoint: str, in_model: str) -> None:
    assert place_of(in_checkpoint) == place_of(in_model)


def test_a_shared_expert_and_images_have_places_of_their_own() -> None:
    names = ("mlp.experts.0.up_proj", "mlp.experts.1.up_proj", "mlp.shared_experts.up_proj", "mlp.up_proj")
    places = {place_of(f"model.layers.0.{name}") for name in names}
    assert len(places | {place_of("model.visual.layers.0.mlp.up_proj")}) == 5


def test_of_a_tied_head_there_is_nothing_to_load() -> None:
    assert _counts(tied=True).plain_parameters == 0
    assert _counts(tied=False).plain_parameters == EMBEDDINGS
    assert has_head(PLAIN)
    assert not has_head(["model.embed_tokens.weight"])


def test_of_a_model_with_images_only_the_text_part_is_counted() -> None:
    layer = {"model.language_model.layers.0.mlp.up_proj.weight": (384, 256)}
    counts = _counts(layer, {"model.vision_tower.layers.0.mlp.up_proj.weight": (512, 512)}, packed=False)
    assert counts.plain_parameters == 384 * 256 + EMBEDDINGS
    assert counts.other_parameters == 0


def test_counts_are_kept_with_a_shape() -> None:
    config = {"model_type": "unknown", "quantization_config": AWQ} | dict.fromkeys(
        ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"), 2
    )
    shape = ModelShape.from_config(config | {"max_position_embeddings": 64})
    assert shape.why_not_counted == "the layout of unknown is not known"
    tensors = _tensors(_awq("model.layers.0.mlp.up_proj", 384, 256), qweight="I32", qzeros="I32", scales="F16")
    counted = shape.counted(config, tensors)
    assert counted.why_not_counted is None
    assert counted.num_parameters == 384 * 256 + 2 * EMBEDDINGS + 256
    assert ModelShape.from_fields(counted.to_fields()) == counted
    held = {each: counted.weights_bytes("bfloat16", each) for each in ("dense", "stored", "int8")}
    rest = 2 * (2 * EMBEDDINGS + 256)
    assert held["dense"] == 2 * 384 * 256 + rest
    assert held["stored"] == counted.counts.stored_bytes + rest
    assert held["int8"] == 384 * (256 + 4) + 320 * (256 + 4) + 2 * (EMBEDDINGS + 256)


@pytest.mark.parametrize(
    ("model_type", "counted"),
    [("llama", 0), ("qwen2", 3 * 256), ("olmo2", 7 * 256)],  # of the last, only its code knows which it has
)
def test_biases_that_a_known_layout_has_not_are_not_counted(model_type: str, counted: int) -> None:
    config = {**dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1), "model_type": model_type}
    config |= {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_key_value_heads": 1,
        "vocab_size": 320,
        "max_position_embeddings": 64,
    }
    config |= {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    names = [f"self_attn.{each}_proj" for each in "qkvo"] + [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
    biases = {f"model.layers.0.{name}.bias": StoredTensor("F16", (256,), 512) for name in names}
    embedding = {"model.embed_tokens.weight": StoredTensor("F16", (320, 256), 2 * 320 * 256)}
    shape = ModelShape.from_config(config).counted(config, embedding | biases)
    assert shape.num_parameters == 320 * 256 + counted
