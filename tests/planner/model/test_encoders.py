"""The encoders' parameters and defaults against the models of transformers, and their plans, which have no KV cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

from llmservice_planner.model.encoders import ENCODERS, is_encoder
from llmservice_planner.model.shape import ModelShape, ShapeError
from llmservice_planner.sizing.gpu import CPU, GIB, Device, find_gpu
from llmservice_planner.sizing.plan import Plan, SizingRequest, plan

_COMMON = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 384, "pad_token_id": 1}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
_VARIANTS: dict[str, dict[str, Any]] = {
    "distilbert": {"hidden_dim": 176},
    "electra": {"embedding_size": 40, "intermediate_size": 176},
    "modernbert": {"intermediate_size": 176, **_TOKENS},
}


@pytest.mark.parametrize("family", sorted(ENCODERS))
def test_parameters_equal_those_of_the_reference_model(family: str) -> None:
    config = CONFIG_MAPPING[family](**_COMMON, **_VARIANTS.get(family, {"intermediate_size": 176}))
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    assert ModelShape.from_config(config.to_dict()).num_parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("family", sorted(ENCODERS))
def test_what_a_config_leaves_out_means_what_it_means_to_transformers(family: str) -> None:
    written = ModelShape.from_config(CONFIG_MAPPING[family]().to_dict())
    assert ModelShape.from_config({"model_type": family}) == written


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}, True),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, False),
        ({"model_type": "deberta-v2", "architectures": ["DebertaV2ForSequenceClassification"]}, False),
        (
            {"model_type": "gemma3_text", "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True},
            True,
        ),
        ({"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}, False),
        ({"architectures": "BertModel"}, False),
    ],
)
def test_decoders_that_embed_or_score_are_encoders(config: dict[str, Any], expected: bool) -> None:
    assert is_encoder(config) is expected


def _plan(device: Device, **settings: Any) -> Plan:
    return plan(SizingRequest(shape=ModelShape.from_config({"model_type": "bert"}), device=device, **settings))


@pytest.mark.parametrize("device", [CPU(4 * GIB), find_gpu("t4")], ids=["cpu", "gpu"])
def test_an_encoder_is_sized_without_a_kv_cache(device: Device) -> None:
    answer = _plan(device)
    assert answer.fits
    assert (answer.kv_bytes_per_token, answer.kv_pool_bytes, answer.num_blocks, answer.sequence_bytes) == (0, 0, 0, 0)
    assert answer.max_num_seqs == 64
    assert answer.guaranteed_sequences == answer.max_num_batched_tokens // 512
    assert answer.decode_step_s is None
    text = "\n".join(answer.explanation)
    assert "no KV cache" in text
    assert "answer: 64 inputs in a batch" in text


def test_an_encoder_that_does_not_fit_says_what_is_missing_and_helps() -> None:
    answer = _plan(CPU(GIB // 2))
    assert not answer.fits
    assert answer.shortfall_bytes > 0
    assert any("give the container at least" in remedy for remedy in answer.remedies)


_TOKENIZER = "tokenizer_config.json"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 512),
        ({"sentence_bert_config.json": {"max_seq_length": 256}}, 256),
        ({"sentence_bert_config.json": {"max_seq_length": None}}, 512),
        ({"sentence_bert_config.json": {"max_seq_length": 1024}}, 512),
        ({_TOKENIZER: {"model_max_length": 128}}, 128),
        ({_TOKENIZER: {"model_max_length": 10**30}}, 512),
        ({_TOKENIZER: {"model_max_length": 1e30}}, 512),
        ({_TOKENIZER: {}}, 512),
        ({"sentence_bert_config.json": {"max_seq_length": 256}, _TOKENIZER: {"model_max_length": 128}}, 256),
        ({"sentence_bert_config.json": {"do_lower_case": False}, _TOKENIZER: {"model_max_length": 128}}, 128),
        ({"sentence_xlm-roberta_config.json": {"max_seq_length": 256}, _TOKENIZER: {"model_max_length": 128}}, 256),
        (
            {
                "sentence_bert_config.json": {},
                "sentence_roberta_config.json": {"max_seq_length": 64},
                "sentence_distilbert_config.json": {"max_seq_length": 32},
            },
            64,
        ),
    ],
)
def test_inputs_are_as_long_as_for_sentence_transformers_unless_more_are_asked_for(
    tmp_path: Path, files: dict[str, Any], expected: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    shape = ModelShape.from_folder(tmp_path)
    assert plan(SizingRequest(shape=shape, device=find_gpu("t4"))).max_model_len == expected
    assert plan(SizingRequest(shape=shape, device=find_gpu("t4"), max_model_len=512)).max_model_len == 512


def test_the_context_of_a_decoder_does_not_depend_on_its_tokenizer(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("sentence_bert_config.json", _TOKENIZER):
        (tmp_path / name).write_text(json.dumps({"max_seq_length": 128, "model_max_length": 128}))
    assert ModelShape.from_folder(tmp_path).default_model_len == 4096


@pytest.mark.parametrize("length", [0, -1, True, "256"])
@pytest.mark.parametrize(
    ("name", "key"), [("sentence_bert_config.json", "max_seq_length"), (_TOKENIZER, "model_max_length")]
)
def test_a_length_that_makes_no_sense_is_refused(tmp_path: Path, name: str, key: str, length: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / name).write_text(json.dumps({key: length}))
    with pytest.raises(ShapeError, match=rf"{name}: {key} is .*, expected a positive whole"):
        ModelShape.from_folder(tmp_path)


def test_other_settings_of_the_input_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    settings = {"max_seq_length": 256, "processing_kwargs": {"text": {"max_length": 64, "truncation": True}}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    with pytest.raises(ShapeError, match=r"sentence_bert_config.json: processing_kwargs are not followed: remove them"):
        ModelShape.from_folder(tmp_path)


def test_a_step_is_never_shorter_than_the_longest_input() -> None:
    shape = ModelShape.from_config({"model_type": "modernbert"})
    answer = plan(SizingRequest(shape=shape, device=CPU(8 * GIB)))
    assert answer.max_num_batched_tokens == 8192
    assert answer.guaranteed_sequences == 1
