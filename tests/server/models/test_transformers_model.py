"""Models whose code is transformers': which are refused, and what is loaded of those with images."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForImageTextToText

from llmservice_planner.commands.capacity import weights_of
from llmservice_planner.model.families import UNSERVED
from llmservice_planner.model.shape import ModelShape, ShapeError
from llmservice_planner.model.source import read_model
from llmservice_planner.sizing.gpu import CPU
from llmservice_planner.sizing.plan import SizingRequest, plan
from llmservice_server.backend.cache_shape import Heads
from llmservice_server.backend.step_input import StepInput
from llmservice_server.engine.config import EngineConfig
from llmservice_server.models.lora import SlotRows
from llmservice_server.models.transformers_config import examine
from llmservice_server.runtime.startup import start
from llmservice_server.types.errors import ModelLoadError

pytestmark = pytest.mark.slow

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LONG_ROPE: dict[str, Any] = {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]},
    "original_max_position_embeddings": 32,
}
"""As the published config.json of Phi-3.5 and Phi-4-mini have it."""
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def write_config(folder: Path, model_type: str, **settings: Any) -> Path:
    AutoConfig.for_model(model_type, **{"pad_token_id": 0, **settings}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "settings", "problem"),
    [
        ("jamba", {}, "layers of linear_attention"),
        ("mamba", {}, "layers of linear_attention"),
        ("rwkv", {}, "recurrent state"),
        ("qwen3_next", {}, "layers of linear_attention"),
        ("deepseek_v32", SMALL | LATENT | {"n_routed_experts": 4}, "layers of indexed_attention"),
        ("falcon", SMALL, "AttentionInterface"),
        ("blt", {}, "reads numbers while it is examined"),
        ("qwen3_5", {"architectures": ["Qwen3_5ForX"]}, "^Qwen3_5ForX .* layers of linear_attention"),
        ("bert", {}, "not causal"),
        ("doge", SMALL, "cannot be served"),
        ("deepseek_v3", SMALL | LATENT | {"head_dim": 16}, "or with this config.json"),
        ("diffllama", SMALL, "expected every layer once"),
        ("t5", {}, "an encoder with a decoder"),
        ("bart", SMALL | {"encoder_layers": 2, "decoder_layers": 2, "is_encoder_decoder": False}, "counts positions"),
        ("clip_vision_model", {}, "no decoder-only language model"),
        ("qwen2", SMALL | {"is_causal": False}, "attention is not causal"),
        ("glm4_moe", SMALL | {"num_key_value_heads": 3}, "4 heads of queries share 3 of keys"),
        ("olmo2", SMALL | {"architectures": ["Olmo2ForOtherThings"]}, "transformers has no model of this name"),
    ],
)
def test_what_cannot_run_on_the_paged_cache_is_refused_by_name(
    tmp_path: Path, model_type: str, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelLoadError, match=problem) as raised:
        examine(write_config(tmp_path, model_type, **settings))
    assert "can be served:" in str(raised.value)  # says what can


@pytest.mark.parametrize("model_type", sorted(UNSERVED))
def test_what_the_planner_refuses_by_name_is_refused(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be served"):
        examine(write_config(tmp_path, model_type))


@pytest.mark.parametrize(
    ("key", "size"), [("num_hidden_layers", 0), ("num_hidden_layers", 10**9), ("max_position_embeddings", -1)]
)
def test_a_size_that_no_model_has_is_refused(tmp_path: Path, key: str, size: int) -> None:
    with pytest.raises(ModelLoadError, match=f"config.json: {key} is {size}, expected 1 to"):
        examine(write_config(tmp_path, "phi3", **SMALL | {key: size}))


@pytest.mark.parametrize(
    ("model_type", "architecture", "runs"),
    [
        ("phimoe", "PhiMoEForCausalLM", "PhimoeForCausalLM"),
        ("internlm3", "InternLM3ForCausalLM", "LlamaForCausalLM"),
    ],
)
def test_published_names_that_transformers_spells_otherwise_are_known(
    tmp_path: Path, model_type: str, architecture: str, runs: str
) -> None:
    write_config(tmp_path, model_type, **SMALL, architectures=[architecture])
    assert examine(tmp_path).architecture == runs


@pytest.mark.parametrize("kind", [{"rope_type": "dynamic", "factor": 2.0}, LONG_ROPE["rope_scaling"]])
def test_rope_that_looks_at_positions_may_turn_a_part_of_the_head(tmp_path: Path, kind: dict[str, Any]) -> None:
    rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, **kind}
    assert examine(write_config(tmp_path, "phi", **SMALL, rope_parameters=rope)).head_dim == 8


def test_latents_may_be_of_other_sizes_in_layers_with_a_window(tmp_path: Path) -> None:
    wider = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 36}
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "per_layer_config": {1: wider}}
    others = {"num_key_value_heads": 4, "head_dim": 12, "num_experts_per_tok": 2, "sliding_window": 24}
    settings = SMALL | LATENT | others
    config = examine(write_config(tmp_path, "dots3_note_text", **settings, **kinds))
    assert (config.head_dim, config.sliding_heads) == (20, Heads(2, 1, 40))
    assert config.windows == (None, 24)


def test_code_that_comes_with_a_checkpoint_is_never_executed(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("raise SystemExit('executed')")
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own_kind", "auto_map": auto_map}))
    with pytest.raises(ModelLoadError, match="never executed"):
        examine(tmp_path)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"original_max_position_embeddings": "32"}, "original_max_position_embeddings.*expected int, got str"),
        ({"rope_scaling": [1]}, "rope_parameters"),
        ({"text_config": {"hidden_size": 32}}, "text_config is .*hidden_size.*, which phi3 has none of"),
        ({"rope_scaling": {**LONG_ROPE["rope_scaling"], "long_factor": [2.0]}}, "long_factor field must have length 4"),
    ],
)
def test_a_key_with_a_wrong_value_is_named_in_one_line(tmp_path: Path, keys: dict[str, Any], problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", **SMALL, **LONG_ROPE, **keys}))
    with pytest.raises(ModelLoadError, match=problem) as raised:
        examine(tmp_path)
    assert "\n" not in str(raised.value)


def test_an_unknown_model_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own_kind"}))
    with pytest.raises(ModelLoadError, match="own_kind"):
        examine(tmp_path)


@pytest.fixture
def olmo(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo2", pad_token_id=0, **SMALL))
    model.save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> None:
    start(EngineConfig(model=folder, max_model_len=64, threads=1))


def test_a_missing_tensor_is_named(olmo: Path) -> None:
    rewrite(olmo, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"none of its safetensors files, among them .*layers\.1\.mlp\.up_proj"):
        load(olmo)


def test_a_tensor_of_another_shape_is_named(olmo: Path) -> None:
    rewrite(olmo, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(48, 31)}))
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj.* has the shape \[48, 31\]"):
        load(olmo)


def test_a_tensor_without_a_place_is_named(olmo: Path) -> None:
    rewrite(olmo, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}))
    with pytest.raises(ModelLoadError, match=r"layers\.2\.mlp\.up_proj.* has no place for"):
        load(olmo)


def test_a_truncated_file_is_refused(olmo: Path) -> None:
    file = olmo / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="fetch it again"):
        load(olmo)


def test_pickled_weights_are_refused(olmo: Path) -> None:
    (olmo / "model.safetensors").rename(olmo / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="safetensors"):
        load(olmo)


VISION = {
    "gemma3": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    },
    "mistral3": {"vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}},
    "qwen2_vl": {"vision_config": {"embed_dim": 32, "hidden_size": 32, "depth": 1, "num_heads": 2}},
    "qwen2_5_vl": {"vision_config": {"hidden_size": 32, "out_hidden_size": 32, "depth": 1, "num_heads": 2}},
    "qwen3_vl": {"vision_config": {"hidden_size": 32, "out_hidden_size": 32, "depth": 1, "num_heads": 2}},
    "qwen3_vl_moe": {"vision_config": {"hidden_size": 32, "out_hidden_size": 32, "depth": 1, "num_heads": 2}},
    "glm4v": {"vision_config": {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 32, "depth": 1}},
    "glm4v_moe": {"vision_config": {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2}},
    "smolvlm": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    },
}
VISION["kimi_k25"] = VISION["qianfan_ocr"] = VISION["gemma3"]
VISION["gemma4"] = VISION["gemma3"] | {"audio_config": None}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}}
SHARED_KEYS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 99,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
GLM = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_parameters": PARTIAL}

MISTRAL_4 = {
    **EXPERTS,
    **GLM,
    **LATENT,
    "model_type": "mistral4",
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 8,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.1,
        "partial_rotary_factor": 0.5,
    },
}


@pytest.mark.parametrize(
    ("model_type", "text", "is_old"),
    [
        ("gemma3", {"head_dim": 16, "sliding_window": 16}, False),
        ("gemma3", {"head_dim": 16, "sliding_window": 16}, True),
        ("mistral3", {"model_type": "mistral", "head_dim": 8}, False),
        ("mistral3", MISTRAL_4, False),
        ("qwen2_vl", POSITIONS, False),
        ("qwen2_5_vl", POSITIONS, False),
        ("qwen3_vl", {"head_dim": 8, **POSITIONS}, False),
        ("qwen3_vl_moe", {**EXPERTS, "head_dim": 8, **POSITIONS}, False),
        ("qwen3_vl_moe", {**EXPERTS, "head_dim": 8, **POSITIONS}, True),
        ("glm4v", {"rope_parameters": PARTIAL}, False),
        ("glm4v_moe", {**EXPERTS, **GLM, "head_dim": 8}, False),
        ("smolvlm", {"model_type": "llama"}, False),
        ("gemma4", {"head_dim": 8, "global_head_dim": 16, **SHARED_KEYS}, False),
        ("kimi_k25", {**EXPERTS, **GLM, **LATENT, "num_key_value_heads": 4, "rope_parameters": None}, False),
        ("qianfan_ocr", {"head_dim": 8}, False),
    ],
)
def test_the_language_model_of_one_with_images_is_served_alone(
    tmp_path: Path, model_type: str, text: dict[str, Any], is_old: bool
) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, text_config=SMALL | text | {"pad_token_id": 0}, **VISION[model_type])
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    if is_old and model_type == "qwen3_vl_moe":  # as published: transformers transposes them when it loads
        rewrite(
            tmp_path,
            lambda tensors: tensors.update(
                {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items() if ".experts." in name}
            ),
        )
    elif is_old:  # as the first checkpoints are: little more than what is not the default
        raw = json.loads((tmp_path / "config.json").read_text())
        kept = {key: raw["text_config"][key] for key in (*SMALL, *text, "model_type", "num_hidden_layers")}
        kept["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
        raw = {key: raw[key] for key in ("architectures", "model_type", "vision_config")} | {"text_config": kept}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    check_text(tmp_path, model)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_so_is_that_of_the_first_checkpoints_of_qwen_with_images(tmp_path: Path, model_type: str) -> None:
    """Their language model's keys are those of the whole, and its tensors have the names of a model without images."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, text_config=SMALL | POSITIONS | {"pad_token_id": 0}, **VISION[model_type])
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    text = raw.pop("text_config")
    positions = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_theta": 1e6}
    raw |= {key: text[key] for key in (*SMALL, "hidden_act", "rms_norm_eps")} | positions
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in tensors.items()
    }
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_text(tmp_path, model)
    counted = ModelShape.from_folder(tmp_path)
    assert counted.architecture == "qwen2"


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma4"])
def test_a_head_is_tied_where_only_the_language_model_says_so_and_the_files_have_none(
    tmp_path: Path, model_type: str
) -> None:
    """transformers 4 wrote LLaVA-OneVision so."""
    torch.manual_seed(1)
    text = {"qwen3_vl": POSITIONS, "gemma4": {"global_head_dim": 16, **SHARED_KEYS}}[model_type]
    text = SMALL | text | {"head_dim": 8, "tie_word_embeddings": True, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, text_config=text, tie_word_embeddings=True, **VISION[model_type])
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    raw["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check_text(tmp_path, model)


@pytest.mark.parametrize("max_model_len", [None, 32])
def test_long_rope_has_the_factors_of_the_context_that_is_served(tmp_path: Path, max_model_len: int | None) -> None:
    """transformers uses the long ones for a prompt beyond the original context; no chunk of it may have the others."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", pad_token_id=0, **SMALL, **LONG_ROPE)).eval()
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(raw | LONG_ROPE | {"rope_theta": 10000.0}))
    started = start(EngineConfig(model=tmp_path, max_model_len=max_model_len, threads=1, dtype="float32"))
    assert started.kv_cache.max_model_len == (max_model_len or SMALL["max_position_embeddings"])
    tokens = torch.arange(3, 93 if max_model_len is None else 35)
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
        chunks = []
        for first in range(0, len(tokens), 20):
            chunk, places = tokens[first : first + 20], torch.arange(first, min(first + 20, len(tokens)))
            step = StepInput.of([(first, len(chunk), range(1, 7))])
            hidden = started.runner.model.forward(chunk, places, started.runner.attention.prepare(step))
            chunks.append(started.runner.model.logits(hidden))
    assert torch.allclose(torch.cat(chunks), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "paligemma", "text_config": SMALL | {"model_type": "gemma", "head_dim": 8}},
        SMALL | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "is_causal": False},  # gte-Qwen2
        SMALL | {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
    ],
    ids=lambda config: config.get("model_type", "gemma3"),
)
def test_tokens_that_see_later_ones_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelLoadError, match="expected causal attention"):
        load(tmp_path)
    with pytest.raises(ShapeError, match="expected causal attention"):
        ModelShape.from_config({"model_type": "gemma3", **config})


def check_text(folder: Path, model: Any) -> None:
    tokens = list(range(3, 43))
    started = start(EngineConfig(model=folder, max_model_len=64, threads=1, dtype="float32"))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
        attend = started.runner.attention.prepare(StepInput.of([(0, 40, [2, 4, 1])]))
        ours = started.runner.model.logits(started.runner.model.forward(torch.tensor(tokens), torch.arange(40), attend))
    assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)
    names = model.config.model_type, model.config.text_config.model_type
    by_transformers = any(each in name for each in ("glm", "gemma4", "kimi", "mistral4") for name in names)
    assert started.model_code == ("transformers" if by_transformers else "own")
    figures = read_model(str(folder))
    weights = weights_of(figures, "float32", "auto")
    request = SizingRequest(shape=figures.shape, device=CPU(1 << 30), weights_bytes=weights, dtype="float32")
    assert started.memory_bytes["weights"] == pytest.approx(plan(request).weights_bytes, rel=0.01)


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl", "gemma4"])
def test_an_adapter_of_a_model_with_images_changes_its_text(tmp_path: Path, model_type: str) -> None:
    """Named as PEFT names it, with factors of the part that reads images, which are left out."""
    torch.manual_seed(1)
    text = {"gemma3": {"sliding_window": 16}, "qwen2_5_vl": POSITIONS}.get(model_type, SHARED_KEYS)
    heads = {} if model_type == "qwen2_5_vl" else {"head_dim": 8, "global_head_dim": 8}
    config = AutoConfig.for_model(
        model_type, text_config=SMALL | heads | text | {"pad_token_id": 0}, **VISION[model_type]
    )
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path)
    adapter, factors = tmp_path / "adapter", {}
    for name, module in model.named_modules():
        is_changed = ".vis" in name or name.endswith((".q_proj", ".down_proj", "lm_head"))
        if isinstance(module, torch.nn.Linear) and is_changed:
            outputs, inputs = module.weight.shape
            down, up = 0.3 * torch.randn(4, inputs), 0.3 * torch.randn(outputs, 4)
            factors[f"base_model.model.{name}.lora_A.weight"] = down
            factors[f"base_model.model.{name}.lora_B.weight"] = up
            module.weight = torch.nn.Parameter(module.weight + 2 * up @ down)  # a tied head is the embedding no more
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    started = start(EngineConfig(model=tmp_path, max_model_len=64, threads=1, dtype="float32", max_loras=1))
    assert started.adapters is not None
    started.adapters.put(0, started.adapters.read(str(adapter)).result())
    tokens = list(range(3, 43))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
        rows = [SlotRows(0, slice(0, 40))]
        hidden = started.runner.forward(StepInput.of([(0, 40, [2, 4, 1])], tokens), rows)
        assert started.runner.adapters is not None
        with started.runner.adapters.applied(rows):
            ours = started.runner.model.logits(hidden)
    assert any(".vis" in name for name in factors)
    assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4)
