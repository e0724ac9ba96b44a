from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from llmservice_server.models.architectures import ARCHITECTURES
from llmservice_server.models.config import SERVED, ModelConfig, is_own
from llmservice_server.types.errors import ModelLoadError

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}


def parse(architecture: str, **keys: Any) -> ModelConfig:
    return ModelConfig.from_dict({"architectures": [f"{architecture}ForCausalLM"], **SHAPE, **keys})


@pytest.mark.parametrize(
    ("architecture", "keys", "windows"),
    [
        ("Llama", {"sliding_window": 100}, (None, None, None, None)),
        ("Mistral", {"sliding_window": 100}, (100, 100, 100, 100)),
        ("Mistral", {"sliding_window": None}, (None, None, None, None)),
        ("Mistral", {}, (4096, 4096, 4096, 4096)),
        (
            "Mistral",  # Ministral 8B, which is a model of its own in transformers
            {"sliding_window": 7, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
            (None, 7, 7, 7),
        ),
        ("Qwen2", {"sliding_window": 100, "max_window_layers": 2}, (None, None, None, None)),
        ("Qwen2", {"sliding_window": 100, "max_window_layers": 2, "use_sliding_window": True}, (None, None, 100, 100)),
        ("Qwen3", {"sliding_window": 7, "max_window_layers": 0, "use_sliding_window": True}, (7, 7, 7, 7)),
        (
            "Qwen3",
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            },
            (None, 7, None, 7),
        ),
    ],
)
def test_windows_follow_the_family(architecture: str, keys: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse(architecture, **keys).windows == windows


@pytest.mark.parametrize("architecture", SERVED)
def test_what_a_config_leaves_out_means_what_it_means_to_transformers(architecture: str) -> None:
    written = CONFIG_MAPPING[SERVED[architecture].name](**SHAPE).to_dict()
    left_out = {"architectures": [architecture], **SHAPE}
    assert ModelConfig.from_dict(left_out) == ModelConfig.from_dict({**written, **left_out})


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        *((name, key) for name in ("Llama", "Gemma") for key in ("query_pre_attn_scalar", "final_logit_softcapping")),
        ("Gemma3", "attn_logit_softcapping"),
        ("Gemma2", "rope_local_base_freq"),
    ],
)
def test_keys_of_another_family_have_no_effect(architecture: str, key: str) -> None:
    assert parse(architecture, **{key: 20.0}) == parse(architecture)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_yarn_of_a_config_replaces_that_of_the_family(name: str) -> None:
    assert parse("GptOss").rope.scaling["factor"] == 32.0
    given = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    rope = parse("GptOss", **{name: given}).rope
    assert rope.scaling == {"factor": 2.0, "original_max_position_embeddings": 512.0}
    assert (rope.theta, rope.truncate) == (150000.0, True)


@pytest.mark.parametrize(
    ("architecture", "keys", "biases"),
    [
        ("Llama", {}, (False, False, False)),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("Mistral", {"attention_bias": True}, (False, False, False)),
        ("Qwen2", {}, (True, False, False)),
        ("Qwen3", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_follow_the_family(architecture: str, keys: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
    config = parse(architecture, **keys)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases


@pytest.mark.parametrize(
    ("architecture", "keys", "head_dim"),
    [("Llama", {}, 8), ("Llama", {"head_dim": None}, 8), ("Qwen3", {}, 128), ("Mistral", {"head_dim": 32}, 32)],
)
def test_head_dim_is_explicit_or_the_familys_default(architecture: str, keys: dict[str, Any], head_dim: int) -> None:
    assert parse(architecture, **keys).head_dim == head_dim


@pytest.mark.parametrize("missing", [key for key in SHAPE if key != "num_key_value_heads"])
def test_a_missing_key_is_named(missing: str) -> None:
    with pytest.raises(ModelLoadError, match=f"config.json has no {missing}"):
        parse("Llama", **{missing: None})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        ({"vocab_size": True}, "vocab_size is True, expected a valid integer"),
        ({"hidden_size": -64}, "hidden_size is -64, expected greater than or equal to 1"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000, expected less than or equal to 1048576"),
        ({"hidden_size": 1e9}, "hidden_size is 1000000000.0, expected a valid integer"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, expected less than or equal to 4096"),
        ({"num_attention_heads": 10**100}, "num_attention_heads is 10{79}…, expected less than"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', expected a valid number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a finite number"),
        ({"rope_theta": "abc"}, "rope_theta is 'abc', expected a valid number"),
        ({"rope_parameters": {"rope_theta": "abc"}}, "rope_parameters.rope_theta is 'abc', expected a valid number"),
        ({"rope_parameters": 3}, "rope_parameters is 3, expected"),
        ({"eos_token_id": "2"}, "eos_token_id is '2', expected a valid integer"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected a valid boolean"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', expected a valid list"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', expected a list of names"),
        (
            {"sliding_window": 7, "use_sliding_window": True, "layer_types": ["full_attention"]},
            "expected full_attention or sliding_attention per layer",
        ),
    ],
)
def test_a_senseless_key_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        parse("Qwen3", **keys)


def test_what_the_operator_accepts_has_a_model() -> None:
    assert ARCHITECTURES.keys() == SERVED.keys()


def test_the_page_about_models_names_every_architecture() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for name in SERVED if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("llama", True), ("mistral", True), ("qwen2_5_vl_text", True), (None, True), ("exaone", False)],
)
def test_a_model_of_another_kind_is_not_of_our_own_whatever_it_names(kind: str | None, expected: bool) -> None:
    """transformers saves EXAONE as a LlamaForCausalLM, with tensors of other names."""
    assert is_own({"architectures": ["LlamaForCausalLM"], "model_type": kind}) == expected


def test_gemma_3_for_text_alone_may_name_the_kind_of_the_whole_model() -> None:
    config = {"architectures": ["Gemma3ForCausalLM"], **SHAPE, "model_type": "gemma3"}
    assert is_own(config)
    assert ModelConfig.from_dict(config) == parse("Gemma3", model_type="gemma3_text")
