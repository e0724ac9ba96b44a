"""config.json files as they come: defaults left out, nested, old and new spellings, broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmservice_planner.model.config import ShapeError, patched
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.gpu import find_gpu
from llmservice_planner.sizing.request import SizingError, SizingRequest

ConfigOf = Callable[[str], dict[str, Any]]


def _shape(config: dict[str, Any], **changes: Any) -> ModelShape:
    return ModelShape.from_config({**config, **changes})


def test_head_dim_is_explicit_where_the_config_has_one(config_of: ConfigOf) -> None:
    assert _shape(config_of("qwen3-0.6b")).head_dim == 128  # and not 1024 / 16


def test_head_dim_is_the_share_of_a_head_where_the_config_has_none(config_of: ConfigOf) -> None:
    assert _shape(config_of("qwen2.5-7b")).head_dim == 128


@pytest.mark.parametrize(("key", "value"), [("dtype", "float16"), ("torch_dtype", "torch.float16")])
def test_dtype_in_either_spelling(config_of: ConfigOf, key: str, value: str) -> None:
    config = {name: item for name, item in config_of("llama-3-8b").items() if name != "torch_dtype"}
    assert _shape(config, **{key: value}).dtype == "float16"


def test_a_config_without_dtype_means_float32(config_of: ConfigOf) -> None:
    config = {name: item for name, item in config_of("llama-3-8b").items() if name != "torch_dtype"}
    assert _shape(config).dtype == "float32"


@pytest.mark.parametrize(
    ("model", "changes", "window", "layers"),
    [
        ("mistral-7b", {}, 4096, 32),
        ("mistral-7b", {"sliding_window": None}, None, 0),
        ("mistral-7b", {"use_sliding_window": False}, 4096, 32),  # a key that it does not read
        ("phi-3-mini", {}, 2047, 32),
        ("phi-3-mini", {"use_sliding_window": False}, 2047, 32),
        ("gemma-2-9b", {}, 4096, 21),  # every second
        ("gemma-3-1b", {}, 512, 22),  # five of six, the last two of 26 too
        ("gemma-3-1b", {"layer_types": ["full_attention"] * 25 + ["sliding_attention"]}, 512, 1),
        ("qwen2.5-7b", {}, None, 0),  # a window that is switched off
        ("qwen2.5-7b", {"use_sliding_window": True, "max_window_layers": 20}, 131072, 8),
        ("qwen1.5-moe-a2.7b", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 21}, 64, 11),
        ("qwen3-30b-a3b", {"use_sliding_window": True, "sliding_window": 64}, 64, 48),
        ("llama-3-8b", {"sliding_window": 4096}, None, 0),  # not a thing in this family
        ("mistral-7b", {"model_type": "ministral3"}, 4096, 32),
        (
            "mistral-7b",
            {"model_type": "mimo_v2_flash", "hybrid_layer_pattern": [0, 1] * 16, "sliding_window_size": 128},
            129,
            16,
        ),
    ],
)
def test_sliding_layers(
    config_of: ConfigOf, model: str, changes: dict[str, Any], window: int | None, layers: int
) -> None:
    shape = _shape(config_of(model), **changes)
    assert (shape.sliding_window, shape.sliding_layers) == (window, layers)


@pytest.mark.parametrize(
    ("keys", "sliding"),
    [
        ({"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1]}, 6),  # as the published config.json of MiMo-V2-Flash
        ({"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 0], "attention_chunk_size": 128}, 5),  # which names it, too
        ({"sliding_window_pattern": 4}, 6),  # as that of Command R7B
        ({"sliding_window_pattern": "LLLG"}, 0),
        ({"sliding_window_pattern": 4, "layer_types": ["sliding_attention"] + ["full_attention"] * 7}, 1),
        ({}, 0),
        ({"model_type": "llama4_text"}, 6),
        ({"model_type": "llama4_text", "no_rope_layers": []}, 6),  # as the published config.json of Scout
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0, 0, 0, 1, 0, 0, 0]}, 2),
        ({"model_type": "llama4_text", "layer_types": ["chunked_attention"] * 5 + ["full_attention"] * 3}, 5),
        ({"model_type": "llama4_text", "attention_chunk_size": None, "sliding_window": None}, 0),
    ],
)
def test_sliding_layers_of_other_families_are_found_without_layer_types(
    config_of: ConfigOf, keys: dict[str, Any], sliding: int
) -> None:
    changes = {"model_type": "cohere2", "num_hidden_layers": 8, "sliding_window": 4096, **keys}
    assert _shape(config_of("llama-3-8b"), **changes).sliding_layers == sliding


@pytest.mark.parametrize(
    ("config", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": "b"}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
        ({"a": "b"}, None, {"a": "b"}),
    ],
)
def test_overrides_are_a_merge_patch(config: dict[str, Any], patch: dict[str, Any], result: dict[str, Any]) -> None:
    """Examples of RFC 7396, appendix A."""
    assert patched(config, patch) == result


@pytest.mark.parametrize("name", ["rope_type", "type"])
@pytest.mark.parametrize("outer", [(), ("text_config",)])
def test_rope_scaling_changes_the_parameters_of_newer_checkpoints(name: str, outer: tuple[str, ...]) -> None:
    config: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    patch: dict[str, Any] = {"rope_scaling": {name: "yarn", "factor": 4.0}}
    for key in outer:
        config, patch = {key: config}, {key: patch}
    result = patched(config, patch)
    for key in outer:
        result = result[key]
    expected = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    assert expected.items() <= result["rope_parameters"].items()
    assert "rope_scaling" not in result


def test_rope_scaling_changes_layers_without_a_window_where_each_kind_has_its_own() -> None:
    local, full = ({"rope_type": "default", "rope_theta": base} for base in (1e4, 1e6))
    config = {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    result = patched(config, {"rope_scaling": {"type": "linear", "factor": 8.0}})["rope_parameters"]
    assert result["sliding_attention"] == local
    assert {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}.items() <= result["full_attention"].items()


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 32768),
        ({"rope_scaling": YARN}, 131072),  # as Qwen's documentation has it
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}}, 131072),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 16384}, 65536),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, 32768),
        ({"rope_scaling": {**YARN, "type": "linear"}}, 32768),
        ({"rope_scaling": {**YARN, "factor": "4"}}, 32768),
        ({"rope_scaling": {**YARN, "factor": float("inf")}}, 32768),
        ({"rope_scaling": YARN, "max_position_embeddings": None}, None),
    ],
)
def test_the_context_is_the_one_that_yarn_stretches_to(
    config_of: ConfigOf, changes: dict[str, Any], expected: int | None
) -> None:
    shape = _shape(config_of("qwen2.5-7b"), **{"max_position_embeddings": 32768, **changes})
    assert shape.max_position_embeddings == expected


def test_the_original_context_beside_rope_is_not_for_layers_with_one_of_their_own(config_of: ConfigOf) -> None:
    changes = {"max_position_embeddings": 32768, "rope_scaling": YARN, "original_max_position_embeddings": 16384}
    assert _shape(config_of("gemma-3-1b"), **changes).max_position_embeddings == 131072


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_the_context_of_gpt_oss_is_not_that_of_its_defaults(name: str) -> None:
    config = {"model_type": "gpt_oss", "max_position_embeddings": 32768, name: {**YARN, "factor": 2.0}}
    assert ModelShape.from_config(config).max_position_embeddings == 65536


@pytest.mark.parametrize(
    ("model", "changes", "dense"),
    [
        ("mixtral-8x7b", {}, 0),
        ("deepseek-v3", {}, 3),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0, 47]}, 2),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, 24),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 2, "mlp_only_layers": [0, 1, 47, 48, "x"]}, 26),
    ],
)
def test_dense_layers_of_a_mixture(config_of: ConfigOf, model: str, changes: dict[str, Any], dense: int) -> None:
    assert _shape(config_of(model), **changes).dense_layers == dense


def test_a_multimodal_config_is_sized_by_its_text_model(config_of: ConfigOf) -> None:
    text = {key: value for key, value in config_of("gemma-3-1b").items() if key != "dtype"}
    nested = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {}}
    assert ModelShape.from_config(nested) == ModelShape.from_config(config_of("gemma-3-1b"))
    assert _shape(config_of("gemma-3-1b"), model_type="gemma3") == ModelShape.from_config(config_of("gemma-3-1b"))


def test_a_quantised_checkpoint_is_recognised(config_of: ConfigOf) -> None:
    assert _shape(config_of("deepseek-v3")).quantization == "fp8/float8/tensor/fp8-activations"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba", "num_attention_heads": None},
            r"model_type mamba is not one whose layout is known \(llama, .* lacks num_attention_heads: .*--shape",
        ),
        ({"model_type": "jamba", "layer_types": ["mamba"]}, r"jamba cannot be served: it has layers of mamba"),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 16}, r"served: it has layers of linear attention"),
        ({"model_type": "kimi_linear", "linear_attn_config": {}}, r"served: it has layers of linear attention"),
        ({"model_type": "nemotron_h", "ssm_state_size": 128}, r"served: it has layers of state spaces"),
        ({"model_type": "recurrent_gemma", "lru_width": 2560}, r"served: it has layers of recurrence"),
        ({"model_type": "mllama_text_model", "cross_attention_layers": [3]}, r"has layers of attention to images"),
        ({"model_type": "deepseek_v32", "index_topk": 2048}, r"has layers of attention to chosen tokens"),
        ({"model_type": "minimax_m1", "attn_type_list": [0, 1]}, r"has layers of linear attention"),
        ({"model_type": "falcon"}, r"falcon cannot be served: its code in transformers has attention of its own"),
        ({"model_type": None}, r"model_type is None, expected one of llama"),
        ({"num_hidden_layers": "32"}, r"num_hidden_layers is '32', expected a whole number"),
        ({"hidden_size": 10**400}, r"hidden_size has 401 digits, expected less than 10\*\*12"),
        ({"num_hidden_layers": 10**11}, r"layers is 100000000000, expected at most 1024"),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 10**11}, r"layers is 100000000000, expected at most 1024"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, r"mlp_only_layers is 3, expected a list of layers"),
        ({"hidden_size": 0}, r"hidden_size is 0, expected a positive whole number"),
        ({"num_attention_heads": True}, r"num_attention_heads is True"),
        ({"vocab_size": 1.5}, r"vocab_size is 1.5"),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings is 'no', expected true or false"),
        ({"torch_dtype": "int8"}, r"dtype is 'int8', expected float32"),
        ({"quantization_config": "awq"}, r"quantization_config is 'awq', expected an object"),
        ({"quantization_config": {"quant_method": "exl2"}}, r"quantised by 'exl2', supported are compressed-tensors"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 3}},
            r"bits is 3, expected 4 or 8",
        ),
        ({"text_config": []}, r"text_config is a list, expected an object"),
        (
            {"model_type": "gemma2", "sliding_window": 4, "layer_types": ["full_attention"]},
            r"layer_types does not list",
        ),
    ],
)
def test_a_config_that_cannot_be_right_is_refused(config_of: ConfigOf, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        _shape(config_of("llama-3-8b"), **changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"does not exist: expected a Hugging Face model folder"),
        (b"{", r"cannot be read as JSON"),
        (b"\xff\xfe", r"cannot be read as JSON"),
        (b"[" * 100_000, r"cannot be read as JSON"),
        (b"[]", r"holds a list, expected a JSON object"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ShapeError, match=message):
        ModelShape.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("modules", "kinds"),
    [
        ([{"type": "sentence_transformers.models.StaticEmbedding", "path": ""}], "StaticEmbedding"),
        ([{"type": "sentence_transformers.base.modules.router.Router"}], "Router"),
        (
            [{"type": "sentence_transformers.models.CLIPModel", "path": "0_CLIPModel"}, {"type": "x.Normalize"}],
            "CLIPModel in 0_CLIPModel, Normalize",
        ),
        ({}, "without modules"),
        ([1], "without modules"),
    ],
)
def test_a_model_without_a_transformer_is_refused_as_what_it_is(tmp_path: Path, modules: Any, kinds: str) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ShapeError) as error:
        ModelShape.from_folder(tmp_path)
    assert str(error.value).startswith(
        f"{tmp_path} holds no config.json: by its modules.json it is a model of sentence-transformers ({kinds}), of "
    )


def test_a_folder_is_read_like_its_config(tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama-3-8b")))
    assert ModelShape.from_folder(tmp_path) == ModelShape.from_config(config_of("llama-3-8b"))


def test_a_family_that_is_not_listed_is_read_by_the_usual_names() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    shape = _shape(gpt2)
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.intermediate_size) == (12, 12, 64, 3072)
    with pytest.raises(SizingError, match=r"the layout of gpt2 is not known, .* give their bytes, or the folder"):
        SizingRequest(shape=shape, device=find_gpu("nvidia-l4"))
    assert SizingRequest(shape=shape, device=find_gpu("nvidia-l4"), weights_bytes=548 * 10**6).weights_bytes


def test_so_are_its_experts_also_where_each_layer_has_a_number_of_its_own() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
    common = {**sizes, "num_hidden_layers": 2, "max_position_embeddings": 512}
    hunyuan = {"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [2, 2], "moe_intermediate_size": [48, 48]}
    ernie = {"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48}
    minimax = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48, "attn_type_list": [1, 1]}
    for config in (hunyuan, ernie, {"model_type": "minimax_m2", **minimax}):
        shape = _shape({**common, **config})
        assert (shape.num_experts, shape.experts_per_token, shape.moe_intermediate_size) == (8, 2, 48)
    assert _shape({**common, "model_type": "hunyuan_v1_dense", "num_experts": 1}).num_experts == 0


GEMMA_4 = {  # 31B, as published
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "layer_types": ([*["sliding_attention"] * 5, "full_attention"]) * 10,
    "max_position_embeddings": 262144,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "num_global_key_value_heads": None,  # as transformers 5.23 writes it
            "global_head_dim": None,
            "per_layer_config": {str(index): {"head_dim": 512, "num_key_value_heads": 4} for index in range(5, 60, 6)},
        },
    ],
    ids=["published", "saved again"],
)
def test_layers_that_see_all_tokens_may_have_other_heads(changes: dict[str, Any]) -> None:
    shape = _shape(GEMMA_4, **changes)
    assert shape.kv_heads_by_kind == ((10, 4, 512), (50, 16, 256))
    assert shape.kv_bytes_per_token("bfloat16") == (10 * 2 * 4 * 512 + 50 * 2 * 16 * 256) * 2
    assert shape.block_groups(16, 2048).num_layers == 5
    assert shape.place_bytes("bfloat16", 1) == 2 * 16 * 256 * 2


def test_keys_of_the_whole_model_hold_where_they_are_not_said_to_be_values() -> None:
    """As of the small Gemma 4, whose last layers use the keys of earlier ones."""
    kinds = [*["sliding_attention"] * 4, "full_attention"] * 7
    small = {"attention_k_eq_v": False, "num_key_value_heads": 1, "num_global_key_value_heads": None}
    shape = _shape(GEMMA_4, **small, num_hidden_layers=35, layer_types=kinds, num_kv_shared_layers=20)
    assert shape.kv_heads_by_kind == ((3, 1, 512), (12, 1, 256))
    assert shape.window_share == 0.5 * 12 / (3 + 0.5 * 12)


def test_mimo_has_more_keys_in_layers_with_a_window() -> None:
    config = {**GEMMA_4, "model_type": "mimo_v2_flash", "num_key_value_heads": 4}
    assert _shape(config).kv_heads_by_kind == ((10, 4, 256), (50, 8, 256))
    assert _shape(config, swa_num_key_value_heads=16).kv_heads_by_kind == ((10, 4, 256), (50, 16, 256))


@pytest.mark.parametrize(
    "changes",
    [
        {"global_head_dim": -1},
        {"num_kv_shared_layers": 60},
        {"num_kv_shared_layers": "many"},
        {"per_layer_config": {"5": {"head_dim": -8}}},
        {"num_global_key_value_heads": 5},
    ],
    ids=str,
)
def test_heads_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ShapeError):
        _shape(GEMMA_4, **changes)
