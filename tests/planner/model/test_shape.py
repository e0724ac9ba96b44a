"""Parameter and KV-cache counts against what the models' authors publish."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmservice_planner.model.shape import FIELD_NAMES, ModelShape, ShapeError
from llmservice_planner.sizing.overhead import dequantized_bytes

ShapeOf = Callable[[str], ModelShape]
FIGURES = {"layers": 32, "hiddenSize": 4096, "intermediateSize": 14336, "heads": 32, "kvHeads": 8, "vocabSize": 128256}


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),  # tied embeddings
        ("qwen2.5-7b", 7_615_616_512),  # biases on q, k and v
        ("qwen3-0.6b", 596_049_920),  # explicit head_dim, q and k norms, tied
        ("qwen3-30b-a3b", 30_532_122_624),  # experts in every layer
        ("qwen1.5-moe-a2.7b", 14_315_784_192),  # a gated shared expert
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("gemma-7b", 8_537_680_896),  # head_dim 256, tied
        ("gemma-2-9b", 9_241_705_984),  # four norms a layer
        ("gemma-3-1b", 999_885_952),
        ("phi-3-mini", 3_821_079_552),  # fused projections count the same
        ("deepseek-v2-lite", 15_706_484_224),  # latent attention without a query latent
        ("deepseek-v3", 671_026_419_200),  # three dense layers, a router bias
    ],
)
def test_parameters_are_those_of_the_model_card(shape_of: ShapeOf, model: str, parameters: int) -> None:
    assert shape_of(model).num_parameters == parameters


@pytest.mark.parametrize(
    ("model", "kib"),
    [
        ("llama-3-8b", 128),
        ("llama-3-70b", 320),
        ("qwen2.5-7b", 56),
        ("mistral-7b", 128),
        ("deepseek-v3", 68.625),
    ],
)
def test_kv_cache_of_a_token_in_bf16(shape_of: ShapeOf, model: str, kib: float) -> None:
    assert shape_of(model).kv_bytes_per_token("bfloat16") == kib * 1024


@pytest.mark.parametrize(
    ("model", "gib"),
    [("llama-3-8b", 14.96), ("llama-3-70b", 131.4), ("qwen2.5-7b", 14.19), ("mistral-7b", 13.50)],
)
def test_weights_in_bf16(shape_of: ShapeOf, model: str, gib: float) -> None:
    assert shape_of(model).num_parameters * 2 / 2**30 == pytest.approx(gib, abs=0.02)


@pytest.mark.parametrize(("model", "gib", "dense_gib"), [("gpt-oss-20b", 12.8, 38.96), ("gpt-oss-120b", 60.8, 217.61)])
def test_experts_in_mxfp4_are_held_so(shape_of: ShapeOf, model: str, gib: float, dense_gib: float) -> None:
    """The checkpoints' sizes are those of the model card (arXiv:2508.10925, table 1)."""
    shape = shape_of(model)
    for on_cpu in (False, True):
        assert shape.weights_bytes("bfloat16", on_cpu=on_cpu) / 2**30 == pytest.approx(gib, abs=0.05)
    assert shape.weights_bytes("bfloat16", "dense") / 2**30 == pytest.approx(dense_gib, abs=0.01)
    assert dequantized_bytes(shape, "bfloat16", "auto") == 0


@pytest.mark.parametrize(("device_count", "heads_over_all_gpus"), [(1, 8), (2, 8), (8, 8), (16, 16), (32, 32)], ids=str)
def test_kv_heads_are_split_until_there_are_more_gpus_than_heads(
    shape_of: ShapeOf, device_count: int, heads_over_all_gpus: int
) -> None:
    shape = shape_of("llama-3-8b")
    assert shape.kv_bytes_per_token("bfloat16", device_count) == shape.layers * 2 * heads_over_all_gpus * 128 * 2


def test_every_gpu_keeps_the_whole_latent(shape_of: ShapeOf) -> None:
    shape = shape_of("deepseek-v3")
    assert shape.kv_bytes_per_token("bfloat16", device_count=8) == 8 * shape.kv_bytes_per_token("bfloat16")


def test_fp8_halves_the_kv_cache_but_for_a_scale_beside_each_key_and_value(shape_of: ShapeOf) -> None:
    shape = shape_of("llama-3-8b")
    scales = 32 * 2 * 8 * 4
    assert shape.kv_bytes_per_token("fp8") == shape.kv_bytes_per_token("bfloat16") // 2 + scales
    assert (
        shape.kv_bytes_per_token("fp8", device_count=16)
        == shape.kv_bytes_per_token("bfloat16", device_count=16) // 2 + 2 * scales
    )


def test_a_latent_has_one_scale(shape_of: ShapeOf) -> None:
    shape = shape_of("deepseek-v3")
    assert shape.kv_bytes_per_token("fp8") == 61 * (512 + 64 + 4) == 61 * shape.place_bytes("fp8", 1)


@pytest.mark.parametrize(
    ("model", "billions"), [("mixtral-8x7b", 12.88), ("qwen3-30b-a3b", 3.35), ("deepseek-v3", 37.55)]
)
def test_a_token_passes_only_its_experts(shape_of: ShapeOf, model: str, billions: float) -> None:
    assert shape_of(model).active_parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_fields_as_text_equal_fields_as_numbers() -> None:
    as_text = {**{key: str(value) for key, value in FIGURES.items()}, "tieWordEmbeddings": "true"}
    assert ModelShape.from_fields(as_text) == ModelShape.from_fields({**FIGURES, "tieWordEmbeddings": True})


def test_fields_default_as_a_config_does() -> None:
    shape = ModelShape.from_fields({key: value for key, value in FIGURES.items() if key != "kvHeads"})
    assert (shape.kv_heads, shape.head_dim) == (32, 128)


def test_a_window_without_a_layer_count_slides_in_every_layer() -> None:
    assert ModelShape.from_fields({**FIGURES, "slidingWindow": 4096}).sliding_layers == 32


def test_null_fields_are_as_if_left_out() -> None:
    assert ModelShape.from_fields({**FIGURES, "slidingWindow": None}) == ModelShape.from_fields(FIGURES)


def test_weights_are_counted_from_the_shape_where_their_counts_are_incomplete() -> None:
    incomplete = ModelShape.from_fields({**FIGURES, "quantizedParameters": 100, "adaptedFeatures": 100})
    assert incomplete.num_parameters == ModelShape.from_fields(FIGURES).num_parameters


def test_the_keys_are_camel_case() -> None:
    assert {"kvHeads", "headDim", "hiddenSize", "tieWordEmbeddings", "kvLoraRank", "vHeadDim"} <= set(FIELD_NAMES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kvheads": 8}, r"unknown shape key kvheads: the keys are layers, hiddenSize"),
        ({"layers": None}, r"the shape lacks layers: at least layers, hiddenSize"),
        ({"layers": "many"}, r"shape key layers is 'many', expected a whole number"),
        ({"layers": True}, r"shape key layers is True, expected a whole number"),
        ({"layers": -1}, r"shape key layers is -1, expected a whole number"),
        ({"layers": "٣"}, r"expected a whole number"),
        ({"layers": "9" * 400}, r"shape key layers has 400 digits, expected at most 12"),
        ({"layers": 0}, r"layers is 0, expected at least 1"),
        ({"heads": 0}, r"heads is 0, expected at least 1"),
        ({"kvHeads": 5}, r"heads 32 is no multiple of kv_heads 5"),
        ({"tieWordEmbeddings": "yes"}, r"shape key tieWordEmbeddings is 'yes', expected true or false"),
        ({"dtype": "int3"}, r"dtype int3 is not known"),
        ({"slidingLayers": 4}, r"sliding_window and sliding_layers go together"),
        ({"slidingWindow": 4096, "slidingLayers": 33}, r"cannot exceed the 32 layers"),
        ({"fullKvHeads": 5}, r"heads 32 is no multiple of kv_heads 5"),
        ({"sharedLayers": 32}, r"shared_layers is 32, expected fewer than the 32 layers"),
        ({"numExperts": 8}, r"experts_per_token 0 must be between 1 and 8"),
        ({"numExperts": 8, "expertsPerToken": 2}, r"moe_intermediate_size is missing"),
        ({"kvLoraRank": 512}, r"kv_lora_rank needs qk_nope_head_dim"),
    ],
)
def test_contradictory_figures_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        ModelShape.from_fields({**FIGURES, **change})


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen2.5-7b", "mistral-7b", "deepseek-v3", "gemma-3-1b"])
def test_fields_survive_a_round_trip(shape_of: ShapeOf, model: str) -> None:
    assert ModelShape.from_fields(shape_of(model).to_fields()) == shape_of(model)
