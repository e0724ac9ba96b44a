"""Every model family against transformers, on small random checkpoints that transformers itself has saved."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from llmservice_planner import families as planner_families
from llmservice_server.backend.base import StepInput
from llmservice_server.engine.config import EngineConfig
from llmservice_server.runtime.startup import load_engine, start
from llmservice_server.types.messages import GenerateRequest, SamplingParams

pytestmark = pytest.mark.slow

STEPS = 64
LOGIT_TOLERANCE = 1e-4  # of the row's largest logit
SMALL = {
    "vocab_size": 193,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Family:
    """A configuration of transformers', and keys that are rewritten in the config.json it saves."""

    config: type[PreTrainedConfig]
    settings: dict[str, Any] = field(default_factory=dict)
    rewrite: dict[str, Any] = field(default_factory=dict)
    shard: str = "1GB"


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama2, all heads with keys of their own": Family(LlamaConfig, {"num_key_value_heads": 6}),
    "llama3, grouped heads and its rope scaling": Family(LlamaConfig, {"rope_parameters": LLAMA3_SCALING}),
    "llama3, tied embeddings": Family(LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": LLAMA3_SCALING}),
    "llama3, config.json as before transformers 5": Family(
        LlamaConfig,
        {"rope_parameters": LLAMA3_SCALING},
        rewrite={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": LLAMA3_SCALING},
    ),
    "llama, linear rope scaling": Family(
        LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}
    ),
    "llama, dynamic rope scaling within its context": Family(
        LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    ),
    "llama, biases everywhere": Family(LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama, sharded safetensors": Family(LlamaConfig, shard="40KB"),
    "llama, explicit head_dim": Family(LlamaConfig, {"head_dim": 32}),
    "mistral, sliding window": Family(MistralConfig, {"sliding_window": 24}),
    "mistral, no window and explicit head_dim": Family(MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen2, biases and tied embeddings": Family(Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2, yarn": Family(Qwen2Config, {"rope_parameters": YARN}),
    "qwen2, a window from the second layer on": Family(
        Qwen2Config, {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    ),
    "qwen3, qk-norm and explicit head_dim": Family(Qwen3Config, {"head_dim": 20}),
    "qwen3, windows by layer, tied and sharded": Family(
        Qwen3Config,
        {
            "use_sliding_window": True,
            "sliding_window": 30,
            "tie_word_embeddings": True,
            "head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        shard="40KB",
    ),
}


def test_every_family_that_is_served_is_compared() -> None:
    served = {name for name, family in planner_families.FAMILIES.items() if family.served_architecture}
    assert {family.config.model_type for family in FAMILIES.values()} == served


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    family: Family = request.param
    return tmp_path, _save(family, tmp_path)


def _save(family: Family, folder: Path) -> PreTrainedModel:
    """Write a checkpoint with weights at which every part matters: norms are not one, biases not zero."""
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(family.config(**{**SMALL, **family.settings}))
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.25 * noise)
    model.eval().save_pretrained(folder, max_shard_size=family.shard)
    assert ((folder / "model.safetensors.index.json").exists()) == (family.shard != "1GB")
    if family.rewrite:
        config = json.loads((folder / "config.json").read_text()) | family.rewrite
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return model


def _prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(SMALL["vocab_size"], (length,), generator=generator).tolist()


def _greedy_reference(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    return tokens[0, len(prompt) :].tolist()


def test_greedy_tokens_are_the_same_for_64_steps(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = checkpoint
    # Chunks, several requests in a batch and windows shorter than the prompts, all at once.
    engine = load_engine(EngineConfig(model=folder, max_num_batched_tokens=64, prefill_chunk_tokens=19, threads=1))
    prompts = {f"{length} tokens": _prompt(length) for length in (1, 50, 90)}
    for request_id, prompt in prompts.items():
        sampling = SamplingParams(max_tokens=STEPS, temperature=0.0)
        engine.add(GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0))
    answers: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            answers[output.request_id] += output.token_ids
    assert answers == {request_id: _greedy_reference(reference, prompt) for request_id, prompt in prompts.items()}


def _logits(folder: Path, tokens: list[int], chunks: list[int], dtype: str) -> torch.Tensor:
    """Logits of every position, computed chunk by chunk over blocks that lie apart from each other."""
    started = start(EngineConfig(model=folder, dtype=dtype, max_model_len=256, threads=1))  # type: ignore[arg-type]
    table = [9, 3, 4, 12, 5, 1, 20, 2, 7, 15]
    runner, rows, position = started.runner, [], 0
    with torch.inference_mode():
        for count in chunks:
            part = torch.tensor(tokens[position : position + count])
            attend = runner.attention.prepare(StepInput.of([(position, count, table)]))
            hidden = runner.model.forward(part, torch.arange(position, position + count), attend)
            rows.append(runner.model.logits(hidden))
            position += count
    assert position == len(tokens)
    return torch.cat(rows)


def _worst(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float(((ours - reference).abs().amax(-1) / reference.abs().amax(-1)).max())


def test_logits_are_the_same_in_chunks_and_over_scattered_blocks(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = checkpoint
    tokens = _prompt(120)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    ours = _logits(folder, tokens, [40, 1, 1, 33, 25, *[1] * 20], "float32")
    assert _worst(ours, expected) < LOGIT_TOLERANCE


def test_bfloat16_is_as_close_to_float32_as_transformers_own(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    check_half_precision(*checkpoint, "bfloat16")


def test_so_is_float16(tmp_path: Path) -> None:
    family = FAMILIES["qwen3, windows by layer, tied and sharded"]
    check_half_precision(tmp_path, _save(family, tmp_path), "float16")


def check_half_precision(folder: Path, reference: PreTrainedModel, dtype: str) -> None:
    tokens = _prompt(60)
    with torch.inference_mode():
        exact = reference(torch.tensor([tokens])).logits[0]
        theirs = reference.to(getattr(torch, dtype))(torch.tensor([tokens])).logits[0].float()
    ours = _logits(folder, tokens, [30, 20, *[1] * 10], dtype)
    assert ours.dtype == torch.float32
    assert _worst(ours, exact) < 2 * _worst(theirs, exact)
