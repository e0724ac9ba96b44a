"""Rotary embeddings against transformers' own formulas."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmservice_server.models.rope import RopeConfig, RotaryEmbedding, rotate
from llmservice_server.models.transformers_config import read_configs
from llmservice_server.types.checkpoint_config import CheckpointConfig
from llmservice_server.types.errors import ModelLoadError

CONTEXT = 4096
REST = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def rope_of(raw: dict[str, Any]) -> RopeConfig:
    complete = {**REST, "max_position_embeddings": CONTEXT, **raw}
    return RopeConfig.of(CheckpointConfig.parse({k: v for k, v in complete.items() if v is not None}, "config.json"))


KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn with bounds of its own": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 512,
    },
    "yarn with an attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 1024,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("parameters", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    config = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 500_000.0, **parameters},
    )
    expected, expected_scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    rope = rope_of(config.to_dict())
    frequencies, scale = rope.inverse_frequencies(head_dim, CONTEXT)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(expected_scale)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"attn_factor": 0.8782488562869419}, 1.0),  # as DeepSeek-R1-0528-Qwen3-8B has it
        ({"attn_factor": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}, 0.5),
        ({"attn_factor": 0.5, "attention_factor": 1.3}, 1.3),
    ],
)
def test_attn_factor_multiplies_what_yarn_makes_of_its_factor_in_either_code(
    tmp_path: Path, more: dict[str, float], expected: float
) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, **more}
    raw = {"model_type": "qwen3", "head_dim": 64, "max_position_embeddings": CONTEXT, "rope_scaling": scaling, **REST}
    assert rope_of(raw).inverse_frequencies(64, CONTEXT)[1] == pytest.approx(expected)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    _, text = read_configs(tmp_path)
    assert ROPE_INIT_FUNCTIONS["yarn"](text, torch.device("cpu"))[1] == pytest.approx(expected)


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    ],
)
def test_old_and_new_configs_say_the_same(raw: dict[str, Any]) -> None:
    rope = rope_of(raw)
    assert (rope.kind, rope.theta, rope.scaling["factor"]) == ("linear", 1e6, 2.0)


BOTH_KINDS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("model_type", "parameters"),
    [
        ("qwen3", {"rope_type": "default", "rope_theta": 1e6}),
        ("gemma3_text", BOTH_KINDS),
        ("gemma3_text", BOTH_KINDS | {"rope_type": "default", "rope_theta": {"global": 1e6, "local": 1e4}}),
    ],
)
def test_rope_scaling_beside_rope_parameters_is_read_as_transformers_reads_it(
    tmp_path: Path, model_type: str, parameters: dict[str, Any]
) -> None:
    raw = {"model_type": model_type, "head_dim": 64, "max_position_embeddings": CONTEXT, "rope_theta": 5e5, **REST}
    raw |= {"rope_parameters": parameters, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"layer_types": ["full_attention"]}))
    expected = read_configs(tmp_path)[1].rope_parameters
    expected = expected.get("full_attention", expected)
    rope = rope_of(raw)
    assert (rope.kind, rope.scaling["factor"]) == (expected["rope_type"], expected["factor"]) == ("linear", 2.0)
    assert rope.theta == expected["rope_theta"]


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_the_original_context_beside_rope_goes_before_that_within(tmp_path: Path, kind: str) -> None:
    raw = {"model_type": "llama", "head_dim": 64, "max_position_embeddings": CONTEXT, "rope_theta": 5e5, **REST}
    raw |= {"rope_scaling": KINDS[kind], "original_max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    text = read_configs(tmp_path)[1]
    assert text.rope_parameters["original_max_position_embeddings"] == 256
    expected, scale = ROPE_INIT_FUNCTIONS[kind](text, torch.device("cpu"))
    frequencies, our_scale = rope_of(raw).inverse_frequencies(64, CONTEXT)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert our_scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, 4096),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}, 16384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
    ],
)
def test_the_context_is_what_the_embedding_is_right_for(raw: dict[str, Any], expected: int) -> None:
    assert rope_of(raw).max_context(4096) == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_parameters": {"rope_type": "su", "factor": 2.0}}, "rope type 'su' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
        ({"rope_parameters": ["linear"]}, "rope_parameters is .*, expected"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "one for full_attention and one for sliding_attention",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not 1"),
    ],
)
def test_what_is_not_supported_is_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        rope_of(raw)


def test_rotation_keeps_lengths_and_makes_products_depend_on_the_distance_alone() -> None:
    frequencies, scale = rope_of({}).inverse_frequencies(16, CONTEXT)
    rotary = RotaryEmbedding(frequencies, scale, torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    query, key = torch.randn(2, 16)

    def product(query_position: int, key_position: int) -> float:
        heads = torch.stack((query, key))[:, None]
        rotate(heads, *rotary.at(torch.tensor([query_position, key_position])))
        torch.testing.assert_close(heads[:, 0].norm(dim=-1), torch.stack((query, key)).norm(dim=-1))
        return float(heads[0, 0] @ heads[1, 0])

    assert product(105, 100) == pytest.approx(product(5, 0), abs=1e-4)
    assert product(105, 100) != pytest.approx(product(6, 0), abs=1e-2)
