"""`llmservice plan --model URI` reads config.json and the weights' size, never the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save

from harness.stores.model_hub import LLAMA_3_8B, ModelHub
from harness.stores.object_store import ObjectStore
from llmservice_planner.command import main
from llmservice_planner.model.shape import ShapeError
from llmservice_planner.model.source import read_model
from llmservice_server.fetch.figures import read_figures

INDEX = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
SHARDED = {
    "config.json": json.dumps(LLAMA_3_8B).encode(),
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": b"weights" * 1000,
    "model-00002-of-00002.safetensors": b"weights" * 1000,
}


@pytest.fixture
def files(hub: ModelHub) -> Callable[..., ModelHub]:
    def of(**changed: bytes) -> ModelHub:
        hub.files = {**SHARDED, **{name.replace("__", "."): content for name, content in changed.items()}}
        return hub

    return of


@pytest.mark.parametrize("name", ["org/open", "hf://org/open", "hf://org/open@v1"])
def test_repository_is_read_without_its_weights(files: Callable[..., ModelHub], name: str) -> None:
    hub = files()
    model = read_model(name)
    assert model.shape.layers == 32
    assert model.uri == (name if "://" in name else f"hf://{name}")
    assert model.weights_bytes("bfloat16") == 16_060_522_496
    assert model.weights_bytes("float32") is None  # counted from the shape
    read = [request.path for request in hub.seen if "/resolve/" in request.path]
    assert sorted(path.rpartition("/")[2] for path in read) == ["config.json", "model.safetensors.index.json"]


NOT_KNOWN = {
    **LLAMA_3_8B,
    "model_type": "not-known",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
FP8 = {
    "model.embed_tokens.weight": torch.zeros(1024, 512, dtype=torch.bfloat16),
    "model.layers.0.mlp.up_proj.weight": torch.zeros(32768, 512).to(torch.float8_e4m3fn),
    "model.layers.0.mlp.up_proj.weight_scale_inv": torch.zeros(256, 4),
}


@pytest.mark.parametrize("scheme", ["hf", "s3"])
def test_weights_of_an_unknown_family_are_counted_from_the_headers_alone(
    hub: ModelHub, store: ObjectStore, scheme: str
) -> None:
    files = {"config.json": json.dumps(NOT_KNOWN).encode()}
    files |= {f"model-{number}.safetensors": save({name: FP8[name]}) for number, name in enumerate(FP8)}
    hub.files = files
    store.objects |= {f"llms/unknown/{name}": content for name, content in files.items()}
    shape = read_model("hf://org/open" if scheme == "hf" else "s3://models/llms/unknown").shape
    assert shape.tie_word_embeddings  # there is no other head
    dense, stored = (shape.weights_bytes("bfloat16", each) for each in ("dense", "stored"))
    assert dense == 2 * (1024 + 32768) * 512
    assert stored == 2 * 1024 * 512 + 32768 * 512 + 256 * 4 * 4


def test_a_file_of_an_unknown_family_that_is_no_safetensors_is_named(hub: ModelHub) -> None:
    hub.files = {"config.json": json.dumps(NOT_KNOWN).encode(), "model.safetensors": b"short"}
    with pytest.raises(ShapeError, match=r"hf://org/open@main: model.safetensors is no safetensors file"):
        read_model("org/open")


def test_weights_without_an_index_have_the_size_of_their_files(hub: ModelHub) -> None:
    hub.files = {
        "config.json": json.dumps(LLAMA_3_8B).encode(),
        "model.safetensors": b"1" * 5000,
        "old.bin": b"2" * 9000,
    }
    assert read_figures("hf://org/open").weights_bytes == 5000
    hub.files.pop("model.safetensors")
    assert read_figures("hf://org/open").weights_bytes is None


def test_a_dtype_that_config_json_does_not_name_is_that_of_the_weights(hub: ModelHub) -> None:
    config = {key: value for key, value in LLAMA_3_8B.items() if key != "torch_dtype"}
    hub.files = {"config.json": json.dumps(config).encode(), "model.safetensors": save({"a": torch.ones(9).half()})}
    model = read_model("org/open")
    assert (model.shape.dtype, model.shape.counts) == ("float16", None)


@pytest.mark.parametrize(
    "files",
    [
        {"sentence_bert_config.json": b'{"max_seq_length": 256}', "tokenizer_config.json": b"{}"},
        {"sentence_roberta_config.json": b'{"max_seq_length": 256}'},
        {"tokenizer_config.json": b'{"model_max_length": 256}'},
    ],
)
def test_the_longest_input_of_an_encoder_is_that_of_sentence_transformers(
    hub: ModelHub, files: dict[str, bytes]
) -> None:
    hub.files = {"config.json": json.dumps({"model_type": "bert", "torch_dtype": "float32"}).encode(), **files}
    assert read_model("org/open").shape.default_model_len == 256


def test_a_model_without_a_transformer_is_refused_as_what_it_is(hub: ModelHub) -> None:
    hub.files = {"modules.json": b'[{"type": "sentence_transformers.models.StaticEmbedding", "path": ""}]'}
    with pytest.raises(ShapeError, match=r"a model of sentence-transformers \(StaticEmbedding\)"):
        read_model("org/open")


def test_quantisation_that_is_described_apart_is_read_and_counted_from_the_headers(hub: ModelHub) -> None:
    hub.files = {
        "config.json": json.dumps(LLAMA_3_8B).encode(),
        "hf_quant_config.json": json.dumps({"quantization": {"quant_algo": "FP8"}}).encode(),
        "model.safetensors": save(FP8),
    }
    shape = read_model("org/open").shape
    assert shape.quantization == "fp8/float8/tensor/fp8-activations"
    assert shape.weights_bytes("bfloat16", "stored") == 2 * 1024 * 512 + 32768 * (512 + 4)


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ({**LLAMA_3_8B, "tie_word_embeddings": True}, "lm_head.weight"),
        ({"text_config": LLAMA_3_8B, "vision_config": {}}, "model.visual.blocks.0.attn.weight"),
    ],
    ids=["a copy of the embedding", "images"],
)
def test_what_is_not_loaded_of_a_family_of_ours_is_not_counted(
    hub: ModelHub, config: dict[str, Any], more: str
) -> None:
    prefix = "model.language_model" if "visual" in more else "model"
    weights = torch.zeros(128, 64, dtype=torch.bfloat16)
    tensors = {
        f"{prefix}.embed_tokens.weight": weights,
        f"{prefix}.norm.weight": weights[0].clone(),
        more: weights.clone(),
    }
    hub.files = {"config.json": json.dumps(config).encode(), "model.safetensors": save(tensors)}
    assert read_model("org/open").shape.weights_bytes("bfloat16") == 2 * (128 * 64 + 64)


def test_bucket_is_read(store: ObjectStore) -> None:
    store.objects |= {f"llms/llama/{name}": content for name, content in SHARDED.items()}
    assert read_model("s3://models/llms/llama").weights_bytes("bfloat16") == 16_060_522_496


def test_gated_repository_is_read_with_a_token(files: Callable[..., ModelHub], monkeypatch: pytest.MonkeyPatch) -> None:
    hub = files()
    with pytest.raises(ShapeError, match=r"org/gated is gated or private and the token \(HF_TOKEN\) is missing"):
        read_model("org/gated")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert read_model("org/gated").shape.layers == 32


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"config__json": b"{"}, "config.json is no JSON"),
        ({"config__json": b"[]"}, "config.json holds a list, expected a JSON object"),
        ({"config__json": b"{}"}, "model_type is None"),
    ],
)
def test_unusable_config_is_refused(files: Callable[..., ModelHub], changed: dict[str, bytes], complaint: str) -> None:
    files(**changed)
    with pytest.raises(ShapeError, match=complaint):
        read_model("org/open")


def test_missing_repository_and_config_are_refused(hub: ModelHub) -> None:
    with pytest.raises(ShapeError, match="org/absent does not exist on"):
        read_model("org/absent")
    hub.files.pop("config.json")
    with pytest.raises(ShapeError, match=r"holds no config\.json"):
        read_model("org/open")


def test_command_plans_for_a_repository(files: Callable[..., ModelHub], capsys: pytest.CaptureFixture[str]) -> None:
    files()
    assert main(["plan", "--model", "org/open", "--gpu", "l40s", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_bytes"] == 16_060_522_496
    assert main(["plan", "--model", "org/absent", "--gpu", "l40s"]) == 2
    assert capsys.readouterr().err.startswith("llmservice plan: org/absent does not exist on")
