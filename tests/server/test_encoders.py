"""Every encoder family against transformers and sentence-transformers' formulas, and what clients see of them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from llmservice_planner.model.encoders import ENCODERS
from llmservice_planner.model.shape import ModelShape
from llmservice_server.engine.config import EngineConfig, Pooling
from llmservice_server.runtime.encoders import EncoderEngine, load_encoder
from llmservice_server.types.errors import StartError
from llmservice_server.types.messages import Embed, GenerateRequest, SamplingParams

pytestmark = pytest.mark.slow

VOCAB_SIZE, LONGEST = 120, 64
_TYPES = "sentence_transformers.models"
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
}
IDS = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
AFTER_PADDING = {"max_position_embeddings": LONGEST + 2, "pad_token_id": 1}
FAMILIES: dict[str, dict[str, Any]] = {  # by `model_type`, what differs from `SMALL`
    "bert": {},
    "roberta": AFTER_PADDING,
    "xlm-roberta": AFTER_PADDING | {"type_vocab_size": 1},
    "camembert": AFTER_PADDING,
    "distilbert": {"hidden_dim": 80},
    "electra": {"embedding_size": 24},
    "mpnet": AFTER_PADDING,
    "modernbert": IDS | {"local_attention": 16},
    "nomic_bert": {},
    "gte": {},
}


def test_every_family_is_tested() -> None:
    assert FAMILIES.keys() == ENCODERS.keys()


def write_checkpoint(folder: Path, family: str, kind: Any = AutoModel, **settings: Any) -> Path:
    """A random checkpoint, as transformers saves it, with a tokenizer whose pairs have token types."""
    sizes = {**SMALL, **FAMILIES[family], **settings}
    if "hidden_dim" in sizes:
        del sizes["intermediate_size"]
    torch.manual_seed(5)
    model = kind.from_config(CONFIG_MAPPING[family](**sizes, initializer_range=0.3))
    for name, parameter in model.named_parameters():  # biases and norms as well, which are initialised to 0 and 1
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name.lower() and "weight" in name), std=0.2)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    words = [chr(letter) + str(number) for letter in range(ord("a"), ord("z")) for number in range(5)]
    vocab = ["<s>", "[PAD]", "[CLS]", "[SEP]", "[UNK]", *words][:VOCAB_SIZE]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))


def _load(folder: Path, **settings: Any) -> EncoderEngine:
    return load_encoder(EngineConfig(model=folder, dtype="float32", threads=1, **settings))


def _vectors(engine: EncoderEngine, inputs: list[list[int]], type_ids: list[list[int]] | None = None) -> np.ndarray:
    assert engine.embedder.add(Embed(request_id="r", inputs=inputs, type_ids=type_ids or []), 0.0) is None
    assert engine.stats().num_waiting == {"interactive": len(inputs)}
    done = []
    while engine.embedder.due_s() is not None:
        done += engine.embed(None)
    (answer,) = done
    assert answer.error is None
    return np.stack([np.frombuffer(vector, "<f4") for vector in answer.vectors])


def _inputs(count: int = 12) -> list[list[int]]:
    chance = random.Random(3)  # noqa: S311  # test data, no secret
    return [
        [2, *(chance.randrange(4, VOCAB_SIZE) for _ in range(chance.randrange(LONGEST - 1))), 3] for _ in range(count)
    ]


def _pooled(states: np.ndarray, pooling: Pooling) -> np.ndarray:
    """sentence-transformers' Pooling and Normalize of one input without padding."""
    vector = {"mean": states.mean(axis=0), "cls": states[0], "last": states[-1]}[pooling]
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module", params=FAMILIES)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("encoder"), request.param)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_embeddings_in_a_batch_are_the_pooled_states_of_each_input_alone(encoder: Path, pooling: Pooling) -> None:
    inputs = _inputs()
    engine = _load(encoder, pooling=pooling)
    vectors = _vectors(engine, inputs)
    reference = AutoModel.from_pretrained(encoder, dtype=torch.float32).eval()
    for ids, vector in zip(inputs, vectors, strict=True):
        with torch.inference_mode():
            states = reference(torch.tensor([ids])).last_hidden_state[0].numpy()
        assert np.allclose(vector, _pooled(states, pooling), atol=1e-5)
    assert (engine.ready.task, engine.ready.num_blocks, engine.ready.embedding_size) == ("embed", 0, 48)
    assert engine.ready.max_embedding_tokens == LONGEST


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_in_a_batch_are_the_logits_of_each_pair_alone(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path, family, AutoModelForSequenceClassification, num_labels=1)
    pairs = [("a1 b2", "c3 d4 e1"), ("a1 b2", "f2"), ("b1", " ".join(["g2"] * 40))]
    engine = _load(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    encoded = [tokenizer(*pair, return_token_type_ids=True) for pair in pairs]
    logits = _vectors(engine, [each["input_ids"] for each in encoded], [each["token_type_ids"] for each in encoded])
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    knows_types = (getattr(reference.config, "type_vocab_size", None) or 0) > 1
    for each, logit in zip(encoded, logits, strict=True):
        given = {"input_ids": torch.tensor([each["input_ids"]])}
        if knows_types:
            given["token_type_ids"] = torch.tensor([each["token_type_ids"]])
        with torch.inference_mode():
            assert logit == pytest.approx(reference(**given).logits[0].numpy(), abs=2e-5)
    assert (engine.ready.task, engine.ready.embedding_size) == ("score", 1)


@pytest.mark.parametrize(
    ("modules", "settings", "pooling", "length"),
    [
        (None, None, "mean", 1.0),
        (["Transformer", "Pooling", "Normalize"], {"pooling_mode_cls_token": True}, "cls", 1.0),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, "last", None),
        (["Transformer", "Pooling", "Normalize"], {"pooling_mode": "mean"}, "mean", 1.0),
    ],
)
def test_pooling_and_normalization_are_those_of_the_checkpoint(
    tmp_path: Path, modules: list[str] | None, settings: dict[str, Any] | None, pooling: Pooling, length: float | None
) -> None:
    folder = write_checkpoint(tmp_path, "bert")
    if modules is not None:
        path = f"{len(modules) - 1}_Pooling"
        entries = [{"type": f"{_TYPES}.{name}", "path": path if name == "Pooling" else ""} for name in modules]
        (folder / "modules.json").write_text(json.dumps(entries))
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **(settings or {})}))
    given = _vectors(_load(folder), _inputs(3))
    chosen = _vectors(_load(folder, pooling=pooling), _inputs(3))
    assert np.array_equal(given, chosen)
    lengths = np.linalg.norm(given, axis=1)
    assert lengths == pytest.approx(1, abs=1e-5) if length else np.all(abs(lengths - 1) > 0.1)


def test_inputs_are_as_long_as_for_sentence_transformers_unless_more_are_asked_for(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "bert")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    assert _load(folder).ready.max_embedding_tokens == 32
    assert _load(folder, max_model_len=LONGEST).ready.max_embedding_tokens == LONGEST


def test_a_checkpoint_of_pre_training_gives_the_embeddings_of_its_encoder(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "bert", AutoModelForMaskedLM)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    states = AutoModelForMaskedLM.from_pretrained(folder).eval().bert(torch.tensor([[2, 9, 3]])).last_hidden_state[0]
    assert np.allclose(_vectors(_load(folder), [[2, 9, 3]])[0], _pooled(states.detach().numpy(), "mean"), atol=1e-5)


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _write_module(folder: Path, name: str) -> None:
    (folder / "modules.json").write_text(json.dumps([{"type": name}]))


def _write_dense(folder: Path, inputs: int, outputs: int, activation: str = "Identity") -> torch.Tensor:
    """A module of sentence-transformers behind the pooling; returns its weight."""
    path, weight = folder / f"{outputs}_Dense", torch.randn(outputs, inputs) * 0.2
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"activation_function": f"torch.nn.modules.{activation}"}))
    save_file({"linear.weight": weight}, path / "model.safetensors")
    modules, pooling = folder / "modules.json", folder / "1_Pooling"
    if not modules.exists():
        _write_module(folder, f"{_TYPES}.Pooling")
        pooling.mkdir()
        (pooling / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    entries = [*json.loads(modules.read_text()), {"type": f"{_TYPES}.Dense", "path": path.name}]
    modules.write_text(json.dumps(entries))
    return weight


def test_embeddinggemma_is_an_encoder_with_dense_layers(tmp_path: Path) -> None:
    """A Gemma 3 whose tokens see those after them; its vectors go through two layers."""
    torch.manual_seed(5)
    sizes = SMALL | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "use_bidirectional_attention": True,
    }
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    model = AutoModel.from_config(CONFIG_MAPPING["gemma3_text"](**sizes, layer_types=kinds, initializer_range=0.3))
    model.eval().save_pretrained(tmp_path)
    _write_tokenizer(tmp_path)
    first, second = (_write_dense(tmp_path, *each).numpy() for each in ((48, 4 * 48), (4 * 48, 48)))
    engine, inputs = _load(tmp_path), _inputs()
    for ids, vector in zip(inputs, _vectors(engine, inputs), strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        assert np.allclose(vector, second @ first @ states.mean(axis=0), atol=1e-4)
    shape = ModelShape.from_folder(tmp_path)
    assert shape.is_encoder
    assert engine.ready.memory_bytes["weights"] == pytest.approx(shape.weights_bytes("float32"), rel=0.01)
    assert (engine.ready.task, engine.ready.embedding_size) == ("embed", 48)


def test_a_dense_layer_may_have_a_bias_and_an_activation(tmp_path: Path) -> None:
    """As LaBSE's."""
    folder = write_checkpoint(tmp_path, "bert")
    weight, bias = _write_dense(folder, 48, 8, "Tanh"), torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "8_Dense/model.safetensors")
    with torch.inference_mode():
        states = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()(torch.tensor([[2, 9, 3]]))
    expected = torch.tanh(weight @ states.last_hidden_state[0].mean(0) + bias)
    assert np.allclose(_vectors(_load(folder), [[2, 9, 3]])[0], expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(("family", "padding"), [("qwen3", 0), ("llama", None)])
def test_a_decoder_that_scores_pairs_is_an_encoder(tmp_path: Path, family: str, padding: int | None) -> None:
    """As Qwen3-Reranker is published for classification: the state of a pair's last token is scored.

    Without a token of its own for padding, that is also so where the last one ends a text.
    """
    torch.manual_seed(5)
    sizes = SMALL | {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": padding, "eos_token_id": 3}
    config = CONFIG_MAPPING[family](**sizes, num_labels=1, initializer_range=0.3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    _write_tokenizer(tmp_path)
    engine, inputs = _load(tmp_path), _inputs()
    for ids, logit in zip(inputs, _vectors(engine, inputs), strict=True):
        with torch.inference_mode():
            assert logit == pytest.approx(model(torch.tensor([ids])).logits[0].numpy(), abs=2e-5)
    shape = ModelShape.from_folder(tmp_path)
    assert engine.ready.memory_bytes["weights"] == pytest.approx(shape.weights_bytes("float32"), rel=0.01)
    assert (engine.ready.task, shape.is_encoder) == ("score", True)


_QUERY = "encoder.layer.1.attention.self.query.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing tensor": (
        lambda folder: _edit_weights(folder, lambda tensors: tensors.pop(_QUERY)),
        f"1 tensors that BertModel needs are in none of its safetensors files, among them {_QUERY}",
    ),
    "code of its own": (
        lambda folder: (
            _edit_config(folder, auto_map={"AutoModel": "modeling_bert.JinaBertModel"}),
            _edit_weights(folder, lambda tensors: tensors.pop(_QUERY)),
        ),
        "auto_map names code that comes with the checkpoint, which is never executed",
    ),
    "a wrong shape": (
        lambda folder: _edit_weights(folder, lambda tensors: tensors.update({_QUERY: torch.zeros(48, 40)})),
        f"{_QUERY} has the shape [48, 40], config.json makes it [48, 48]",
    ),
    "a layer too many": (lambda folder: _edit_config(folder, num_hidden_layers=2), "has no place for"),
    "no finite number": (
        lambda folder: _edit_weights(folder, lambda tensors: tensors[_QUERY].fill_(math.nan)),
        "not finite in its first step",
    ),
    "a pickle": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "weights as pickles only (pytorch_model.bin)",
    ),
    "no safetensors file": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"nothing"),
        "unreadable safetensors file",
    ),
    "another head": (
        lambda folder: _edit_config(folder, architectures=["BertForTokenClassification"]),
        "architectures is BertForTokenClassification, expected an encoder",
    ),
    "an architecture that is no name": (
        lambda folder: _edit_config(folder, architectures=[7]),
        "architectures is [7], expected a list of names",
    ),
    "a padding beyond the vocabulary": (lambda folder: _edit_config(folder, pad_token_id=10**6), "cannot be loaded"),
    "a decoder": (lambda folder: _edit_config(folder, is_decoder=True), "is_decoder is true"),
    "three labels": (
        lambda folder: _edit_config(
            folder, architectures=["BertForSequenceClassification"], id2label={"0": "a", "1": "b", "2": "c"}
        ),
        "3 labels, expected 1",
    ),
    "no id of its padding": (
        lambda folder: _edit_config(folder, model_type="roberta", architectures=["RobertaModel"], pad_token_id=None),
        "the model cannot compute a step",
    ),
    "a wrong size": (lambda folder: _edit_config(folder, hidden_size=-1), "hidden_size is -1, expected"),
    "a wrong value": (lambda folder: _edit_config(folder, hidden_act=7), "config.json"),
    "another module": (lambda folder: _write_module(folder, f"{_TYPES}.LSTM"), "modules.json names LSTM"),
    "a dense layer of another size": (lambda folder: _write_dense(folder, 32, 8), "no dense layer for 48 numbers"),
    "an activation": (lambda folder: _write_dense(folder, 48, 8, "GELU"), "activation_function is GELU, expected"),
    "no file of its pooling": (lambda folder: _write_module(folder, f"{_TYPES}.Pooling"), "set --pooling"),
    "a vector for each token": (
        lambda folder: _write_module(folder, f"{_TYPES}.Transformer"),
        "a vector for each token, which is not served: choose one vector of a text with --pooling",
    ),
    "a module of PyLate": (
        lambda folder: _write_module(folder, "pylate.models.Dense.Dense"),
        "modules.json names pylate.models.Dense.Dense, expected only",
    ),
}


@pytest.mark.parametrize(("spoil", "words"), BAD.values(), ids=BAD)
def test_a_bad_checkpoint_is_refused_with_what_is_wrong(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    folder = write_checkpoint(tmp_path, "bert")
    spoil(folder)
    with pytest.raises(StartError) as refusal:
        _load(folder)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": LONGEST + 1}, "beyond the model's context of 64 tokens"),
        ({"memory_limit_bytes": 2**20}, "of memory can be used"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(StartError, match=words):
        _load(write_checkpoint(tmp_path, "bert"), **settings)


def test_a_generating_request_is_answered_with_an_error(tmp_path: Path) -> None:
    engine = _load(write_checkpoint(tmp_path, "bert"))
    engine.add(GenerateRequest(request_id="g", prompt_token_ids=[5], sampling=SamplingParams(), arrival_s=0.0))
    assert engine.wait_s() == 0
    (output,) = engine.step().outputs
    assert (output.request_id, output.error_status) == ("g", 400)
    assert engine.wait_s() == math.inf


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """A server of a BERT: `serve(AutoModel)`, one for each kind."""
    processes: dict[Any, Any] = {}

    def find(kind: Any, server_process: Any, **settings: Any) -> Any:
        if kind not in processes:
            folder = write_checkpoint(tmp_path_factory.mktemp("served"), "bert", kind, **settings)
            processes[kind] = server_process(folder, "--served-model-name", "tiny"), folder
        process, folder = processes[kind]
        return process.wait_until_ready(), folder

    yield find
    for process, _ in processes.values():
        process.close()


@pytest.fixture
def embedder(serve: Any, server_process: Any) -> Any:
    return serve(AutoModel, server_process)


@pytest.fixture
def reranker(serve: Any, server_process: Any) -> Any:
    return serve(AutoModelForSequenceClassification, server_process, num_labels=1)


def test_an_encoder_answers_embeddings(embedder: Any) -> None:
    server, folder = embedder
    status, answer = server.post("/v1/embeddings", {"model": "tiny", "input": ["a1 b2 c3", "d4"]})
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == 5 + 3
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, each in zip(["a1 b2 c3", "d4"], answer["data"], strict=True):
        states = reference(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].detach().numpy()
        assert each["embedding"] == pytest.approx(_pooled(states, "mean"), abs=1e-5)
    long, too_long = " ".join(["a1"] * 100), server.post("/v1/embeddings", {"model": "tiny", "input": "a1 " * 100})
    assert too_long[0] == 400
    assert "102 tokens, expected at most 64" in too_long[1]["error"]["message"]
    cut, whole = (
        server.post("/v1/embeddings", {"model": "tiny", **body})[1]["data"][0]["embedding"]
        for body in ({"input": long, "truncate_prompt_tokens": -1}, {"input": " ".join(["a1"] * 62)})
    )
    assert cut == pytest.approx(whole, abs=1e-5), "the special tokens are kept"
    status, answer = server.post("/v1/embeddings", {"model": "tiny", "input": long, "truncate_prompt_tokens": 1})
    assert status == 400
    assert "truncate_prompt_tokens is 1, expected more than the 2 tokens" in answer["error"]["message"]


def test_what_an_encoder_does_not_do_is_refused_with_what_it_does(embedder: Any, reranker: Any, server: Any) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a1"}]}
    pairs = {"model": "tiny", "query": "a", "documents": ["b"]}
    for process, path, body, words in (
        (embedder[0], "/v1/chat/completions", chat, "it embeds texts"),
        (embedder[0], "/v1/completions", {"model": "tiny", "prompt": "a"}, "it embeds texts"),
        (embedder[0], "/v1/rerank", pairs, "it embeds texts"),
        (reranker[0], "/v1/embeddings", {"model": "tiny", "input": "a"}, "it scores pairs"),
        (reranker[0], "/v1/completions", {"model": "tiny", "prompt": "a"}, "it scores pairs"),
        (server, "/v1/rerank", pairs, "this model generates text"),
        (server, "/v1/score", {"model": "tiny", "text_1": "a", "text_2": "b"}, "this model generates text"),
    ):
        status, answer = process.post(path, body)
        assert (status, answer["error"]["code"]) == (400, "unsupported_task")
        assert words in answer["error"]["message"]


def test_models_health_metrics_and_sizing_of_an_encoder(embedder: Any) -> None:
    server, _ = embedder
    assert json.loads(server.get("/v1/models")[1])["data"][0]["max_model_len"] == LONGEST
    assert server.get("/health")[0] == 200
    sizing = json.loads(server.get("/sizing")[1])
    assert (sizing["num_blocks"], sizing["max_num_seqs"], sizing["memory_bytes"]["kv_cache"]) == (0, 64, 0)
    assert sizing["shape"]["encoderParameters"] > 0
    before = server.metric("llmservice_embedding_inputs_total")
    server.post("/v1/embeddings", {"model": "tiny", "input": ["a1", "b1"]})
    assert server.metric("llmservice_embedding_inputs_total") == before + 2
    assert server.metric("llmservice_kv_cache_usage_perc") == 0
    status, answer = server.post("/tokenize", {"prompt": "a1"})
    assert (status, answer["tokens"][0], answer["tokens"][-1]) == (200, 2, 3)


DOCUMENTS = ["c3 d4 e1", "f2", "a1 g2 h3 b2"]


def _expected_logits(folder: Path, query: str, documents: list[str]) -> list[float]:
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    encoded = [tokenizer(query, each, return_tensors="pt", return_token_type_ids=True) for each in documents]
    return [reference(**each).logits.item() for each in encoded]


def test_rerank_in_jinas_format(reranker: Any) -> None:
    server, folder = reranker
    logits = _expected_logits(folder, "a1 b2", DOCUMENTS)
    best = sorted(range(3), key=lambda index: -logits[index])
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        status, answer = server.post(path, {"model": "tiny", "query": "a1 b2", "documents": documents})
        assert status == 200, answer
        assert [each["index"] for each in answer["results"]] == best
        for each in answer["results"]:
            assert each["relevance_score"] == pytest.approx(1 / (1 + math.exp(-logits[each["index"]])), abs=1e-5)
            assert each["document"] == {"text": DOCUMENTS[each["index"]]}
        assert answer["usage"]["total_tokens"] == 3 * (2 + 3) + 3 + 1 + 4
    body = {"model": "tiny", "query": "a1 b2", "documents": documents, "top_n": 1, "return_documents": False}
    (first,) = server.post("/v1/rerank", body)[1]["results"]
    assert first.keys() == {"index", "relevance_score"}


def test_rerank_in_teis_format(reranker: Any) -> None:
    server, folder = reranker
    logits = _expected_logits(folder, "a1 b2", DOCUMENTS)
    body = {"query": "a1 b2", "texts": DOCUMENTS, "raw_scores": True, "return_text": True}
    body["truncation_direction"] = "right"
    status, answer = server.post("/rerank", body)
    assert status == 200, answer
    assert [each["score"] for each in answer] == pytest.approx(sorted(logits, reverse=True), abs=1e-5)
    assert all(each["text"] == DOCUMENTS[each["index"]] for each in answer)
    assert server.post("/rerank", {"query": "a1 b2", "texts": ["f2"]})[1][0].keys() == {"index", "score"}


def test_score_in_vllms_format(reranker: Any) -> None:
    server, folder = reranker
    logits = _expected_logits(folder, "a1 b2", DOCUMENTS)
    for body in (
        {"text_1": "a1 b2", "text_2": DOCUMENTS},
        {"text_1": ["a1 b2"] * 3, "text_2": DOCUMENTS},
        {"queries": "a1 b2", "documents": DOCUMENTS},
    ):
        status, answer = server.post("/v1/score", {"model": "tiny", "raw_scores": True, **body})
        assert status == 200, answer
        assert [each["index"] for each in answer["data"]] == [0, 1, 2]
        assert [each["score"] for each in answer["data"]] == pytest.approx(logits, abs=1e-5)


def test_a_pair_that_is_too_long_is_cut_only_where_that_is_asked_for(reranker: Any) -> None:
    server, folder = reranker
    body = {"model": "tiny", "query": "a1 b2", "documents": ["f2", "c3 " * 100]}
    status, answer = server.post("/v1/rerank", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "pair 1 has 105 tokens with the special ones, expected at most 64" in answer["error"]["message"]
    results = server.post("/v1/rerank", {**body, "truncate": True, "raw_scores": True})[1]["results"]
    (expected,) = _expected_logits(folder, "a1 b2", [" ".join(["c3"] * (LONGEST - 5))])
    assert next(each["relevance_score"] for each in results if each["index"] == 1) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/rerank", {"query": "a"}, "either documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "texts": ["b"]}, "either documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "0 texts, expected 1 to"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": [7]}, "documents[0]"),
        ("/v1/score", {"text_1": "a"}, "either text_1 and text_2"),
        ("/v1/score", {"text_1": "a", "documents": ["b"]}, "either text_1 and text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 holds 2 texts and text_2 1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2 0"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/rerank", {"query": "a", "texts": ["b"], "truncation_direction": "left"}, "truncation_direction"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "model": None}, "you must provide model"),
    ],
)
def test_bad_bodies_are_refused(reranker: Any, path: str, body: dict[str, Any], words: str) -> None:
    status, answer = reranker[0].post(path, {"model": "tiny", **body})
    assert status == 400
    assert words in answer["error"]["message"]
