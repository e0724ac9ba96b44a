"""Embeddings against transformers' hidden states, and what happens to those that cannot be computed."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Llama4TextConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from llmservice_server.engine.config import EngineConfig, Implementation, Pooling
from llmservice_server.runtime.embedding_model import EmbeddingModel
from llmservice_server.runtime.embeddings import BatchEmbedder
from llmservice_server.runtime.startup import load_engine, start
from llmservice_server.runtime.vector_format import VectorFormat
from llmservice_server.types.errors import ModelLoadError
from llmservice_server.types.messages import Embed

SMALL = {
    "vocab_size": 193,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "mistral, sliding window": MistralConfig(**SMALL, sliding_window=24),
    "qwen3, normed heads": Qwen3Config(**SMALL, head_dim=16),
}
OTHERS = {
    "llama4, chunks": Llama4TextConfig(
        **{**SMALL, "num_hidden_layers": 4},
        head_dim=8,
        intermediate_size_mlp=80,
        num_local_experts=2,
        attention_chunk_size=32,
    ),
}


def _inputs(count: int) -> list[list[int]]:
    chance = random.Random(3)  # noqa: S311  # test data, no secret
    return [[chance.randrange(193) for _ in range(chance.randrange(1, 90))] for _ in range(count)]


def _embedder(model: Path, pooling: Pooling = "last") -> BatchEmbedder:
    config = EngineConfig(model=model, dtype="float32", kv_cache_memory_bytes=2**20, threads=1, max_model_len=128)
    runner = start(config).runner
    return BatchEmbedder(
        EmbeddingModel(runner.model, VectorFormat.plain(runner.model.config.hidden_size, pooling)),
        runner.recover,
        vocab_size=193,
        max_tokens=128,
        max_batch_tokens=512,
        window_s=0.01,
    )


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config: PreTrainedConfig = request.param
    torch.manual_seed(5)
    directory = tmp_path_factory.mktemp("checkpoint")
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def _embed(embedder: BatchEmbedder, inputs: list[list[int]]) -> np.ndarray:
    assert embedder.add(Embed(request_id="r", inputs=inputs), 0.0) is None
    while not (done := embedder.step(1.0)):
        pass
    assert done[0].error is None
    assert embedder.due_s() is None
    return np.stack([np.frombuffer(vector, "<f4") for vector in done[0].vectors])


@pytest.mark.parametrize("checkpoint", [*FAMILIES.values(), *OTHERS.values()], ids=[*FAMILIES, *OTHERS], indirect=True)
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_pooled_hidden_states_of_transformers(checkpoint: Path, pooling: Pooling) -> None:
    inputs = _inputs(40)
    vectors = _embed(_embedder(checkpoint, pooling), inputs)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).model.eval()
    for ids, vector in zip(inputs, vectors, strict=True):
        with torch.inference_mode():
            states = reference(torch.tensor([ids])).last_hidden_state[0]
        pooled = states[-1] if pooling == "last" else states.mean(dim=0)
        expected = torch.nn.functional.normalize(pooled, dim=-1).numpy()
        assert np.allclose(vector, expected, atol=1e-5)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
@pytest.mark.parametrize("implementation", ["own", "transformers"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "no head"])
def test_a_decoder_that_was_saved_for_embeddings_is_pooled_as_its_files_say(
    tmp_path: Path, architecture: str, implementation: Implementation, tied: bool
) -> None:
    """As Qwen3-Embedding: the tensors have the names that they have in a model without a head."""
    torch.manual_seed(5)
    reference = AutoModelForCausalLM.from_config(Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=tied)).eval()
    reference.save_pretrained(tmp_path)
    _save_for_embeddings(tmp_path, architecture)
    config = EngineConfig(
        model=tmp_path, dtype="float32", threads=1, max_model_len=128, implementation=implementation, attention="torch"
    )
    engine = load_engine(config)
    assert engine.ready.task == ("generate" if tied else "embed")
    weights = sum(each.nbytes for each in reference.model.parameters())
    assert engine.ready.memory_bytes["weights"] == pytest.approx(weights, rel=0.01)
    assert isinstance(engine.embedder, BatchEmbedder)
    for ids, vector in zip(_inputs(3), _embed(engine.embedder, _inputs(3)), strict=True):
        with torch.inference_mode():
            states = reference.model(torch.tensor([ids])).last_hidden_state[0]
        assert np.allclose(vector, torch.nn.functional.normalize(states.mean(dim=0), dim=-1).numpy(), atol=1e-5)


def _save_for_embeddings(folder: Path, architecture: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')


def test_vectors_of_a_decoder_go_through_its_modules(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are not of length 1 where modules.json names no Normalize."""
    torch.manual_seed(5)
    reference = AutoModelForCausalLM.from_config(Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)).eval()
    reference.save_pretrained(tmp_path)
    modules = [{"type": f"sentence_transformers.models.{name}", "path": f"2_{name}"} for name in ("Pooling", "Dense")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for path in ("2_Pooling", "2_Dense"):
        (tmp_path / path).mkdir()
    (tmp_path / "2_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    (tmp_path / "2_Dense/config.json").write_text('{"activation_function": "torch.nn.Identity"}')
    weight = torch.randn(10, SMALL["hidden_size"])
    save_file({"linear.weight": weight}, tmp_path / "2_Dense/model.safetensors")
    settings = {"max_seq_length": 100, "processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    engine = load_engine(EngineConfig(model=tmp_path, dtype="float32", threads=1, max_model_len=128))
    assert (engine.ready.task, engine.ready.embedding_size) == ("generate", 10)
    assert engine.ready.max_embedding_tokens == 100
    assert "sentence_bert_config.json: processing_kwargs have no effect on /v1/embeddings" in caplog.text
    assert isinstance(engine.embedder, BatchEmbedder)
    for ids, vector in zip(_inputs(3), _embed(engine.embedder, _inputs(3)), strict=True):
        with torch.inference_mode():
            states = reference.model(torch.tensor([ids])).last_hidden_state[0]
        assert np.allclose(vector, (weight @ states.mean(dim=0)).numpy(), atol=1e-4)


def test_a_missing_head_of_a_model_that_generates_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(Qwen3Config(**SMALL, head_dim=16)).save_pretrained(tmp_path)
    _save_for_embeddings(tmp_path, "Qwen3ForCausalLM")
    shutil.rmtree(tmp_path / "1_Pooling")
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight"):
        load_engine(EngineConfig(model=tmp_path, dtype="float32", threads=1, max_model_len=128))


def test_a_decoder_without_a_head_whose_code_comes_with_it_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(Qwen3Config(**SMALL, head_dim=16)).save_pretrained(tmp_path)
    _save_for_embeddings(tmp_path, "Qwen3Model")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling.Qwen3Model"}}))
    with pytest.raises(ModelLoadError, match="code that comes with the checkpoint"):
        load_engine(EngineConfig(model=tmp_path, dtype="float32", threads=1, max_model_len=128))


def test_an_input_that_is_computed_in_pieces_has_the_same_vector(checkpoint: Path) -> None:
    model = _embedder(checkpoint, "mean")._model
    ids = max(_inputs(40), key=len)
    *nothing, vector = model.embed_by_piece([ids], rows=16)
    assert nothing == [None] * 3 * math.ceil(len(ids) / 16)
    assert vector is not None
    assert torch.allclose(vector, model.embed([ids]), atol=1e-5)


def test_a_long_input_is_computed_in_pieces_of_what_the_steps_leave(tiny_model: Path) -> None:
    embedder, inputs = _embedder(tiny_model), [[5] * 100]
    alone = _embed(embedder, inputs)
    assert embedder.add(Embed(request_id="r", inputs=inputs), 0.0) is None
    pieces = 0
    while not (done := embedder.step(1.0, 25)):
        pieces += 1
    assert pieces == 2 * 4, "two layers of four pieces, and the pooling"
    assert np.allclose(np.frombuffer(done[0].vectors[0], "<f4"), alone[0], atol=1e-5)


def test_a_vector_does_not_depend_on_the_rest_of_its_batch(tiny_model: Path) -> None:
    embedder, inputs = _embedder(tiny_model), _inputs(20)
    together = _embed(embedder, inputs)
    alone = np.concatenate([_embed(embedder, [ids]) for ids in inputs])
    assert np.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "no tokens"),
        ([[1], []], "no tokens"),
        ([[1] * 129], "129 tokens, expected at most 128"),
        ([[193]], "outside the model's vocabulary"),
        ([[-1]], "outside the model's vocabulary"),
    ],
)
def test_what_can_never_be_served_is_answered_at_once(tiny_model: Path, inputs: list[list[int]], words: str) -> None:
    embedder = _embedder(tiny_model)
    refused = embedder.add(Embed(request_id="r", inputs=inputs), 0.0)
    assert refused is not None
    assert refused.error_status == 400
    assert words in str(refused.error)
    assert embedder.due_s() is None


def test_a_request_taken_back_is_not_computed(tiny_model: Path) -> None:
    embedder = _embedder(tiny_model)
    embedder.add(Embed(request_id="r", inputs=[[1, 2]]), 0.0)
    embedder.abort(["r", "unknown"])
    assert embedder.due_s() is None
    assert embedder.step(1.0) == []


def test_states_that_are_not_finite_fail_their_own_request_only(tiny_model: Path) -> None:
    config = EngineConfig(model=tiny_model, dtype="float32", kv_cache_memory_bytes=2**20, threads=1)
    runner = start(config).runner
    model = runner.model
    model.embed_tokens[7] = float("nan")
    embedder = BatchEmbedder(
        EmbeddingModel(model, VectorFormat.plain(model.config.hidden_size, "mean")),
        runner.recover,
        vocab_size=100,
        max_tokens=64,
        max_batch_tokens=512,
        window_s=0.01,
    )
    embedder.add(Embed(request_id="bad", inputs=[[5, 7], [5]]), 0.0)
    embedder.add(Embed(request_id="good", inputs=[[5, 6]]), 0.0)
    done = {}
    while embedder.due_s() is not None:
        done |= {answer.request_id: answer for answer in embedder.step(1.0)}
    assert "not finite" in str(done["bad"].error)
    assert len(done["good"].vectors) == 1


def test_an_input_that_breaks_the_computation_fails_its_own_request_only(tiny_model: Path) -> None:
    embedder = _embedder(tiny_model)  # configured with a larger vocabulary than the model has
    embedder.add(Embed(request_id="bad", inputs=[[5, 6], [5, 192]]), 0.0)
    embedder.add(Embed(request_id="good", inputs=[[5, 7], [8, 9]]), 0.0)
    embedder._model._model.embed_tokens = embedder._model._model.embed_tokens[:100]
    done = embedder.step(1.0)
    assert {answer.request_id: len(answer.vectors) for answer in done} == {"bad": 0, "good": 2}
    assert "failed to compute" in str(next(answer for answer in done if answer.request_id == "bad").error)
    assert embedder.due_s() is None


def _steps_until_done(embedder: BatchEmbedder, max_tokens: int) -> int:
    for count in range(1, 1000):
        if done := embedder.step(1.0, max_tokens):
            assert done[0].error is None
            return count
    raise AssertionError("never computed")


def test_beside_running_requests_a_batch_is_computed_layer_by_layer_with_the_tokens_that_are_left(
    checkpoint: Path,
) -> None:
    embedder = _embedder(checkpoint)  # of three layers; the pooling counts as one more
    alone = _embed(embedder, [[5, 6, 7, 8]])
    embedder.add(Embed(request_id="r", inputs=[[5, 6, 7, 8]]), 0.0)
    assert _steps_until_done(embedder, max_tokens=4) == 4
    embedder.add(Embed(request_id="r", inputs=[[5, 6, 7, 8]]), 0.0)
    assert _steps_until_done(embedder, max_tokens=1) == 16  # a layer once four tokens have been left
    embedder.add(Embed(request_id="r", inputs=[[5, 6, 7, 8]]), 0.0)
    assert embedder.step(1.0, 4) == []
    assert embedder.due_s() == 0.0
    vectors = embedder.step(1.0)[0].vectors  # no request generates any more
    assert np.allclose(np.frombuffer(vectors[0], "<f4"), alone, atol=1e-5)


def test_a_request_taken_back_in_the_middle_of_its_batch_is_not_answered(tiny_model: Path) -> None:
    embedder = _embedder(tiny_model)
    embedder.add(Embed(request_id="gone", inputs=[[5, 6]]), 0.0)
    embedder.add(Embed(request_id="stays", inputs=[[7, 8]]), 0.0)
    assert embedder.step(1.0, 4) == []
    embedder.abort(["gone"])
    assert [answer.request_id for answer in embedder.step(1.0)] == ["stays"]
    assert embedder.due_s() is None
