"""Embeddings against transformers' hidden states, and what happens to those that cannot be computed."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from llmservice_server.engine.config import EngineConfig, Implementation, Pooling
from llmservice_server.runtime.embeddings import BatchEmbedder, Batcher, EmbeddingModel, Item, Pace
from llmservice_server.runtime.startup import load_engine, start
from llmservice_server.runtime.vector_format import VectorFormat
from llmservice_server.types.errors import ModelLoadError
from llmservice_server.types.messages import Embed


def test_without_a_measured_step_the_tokens_alone_bound_a_piece() -> None:
    pace = Pace()
    assert pace.rows(200) == 200
    assert pace.allows(10_000)


@pytest.mark.parametrize(("step_s", "row_s"), [(0.04, 0.0001), (0.04, 0.00002), (0.4, 0.0001)])
def test_a_piece_comes_to_take_less_than_a_fifth_of_a_step(step_s: float, row_s: float) -> None:
    """Of a layer whose weights take half a millisecond to read, however few tokens there are."""
    pace, spent = Pace(), []
    for _ in range(500):
        pace.add_step(step_s)
        rows = pace.rows(200)
        if pace.allows(rows):
            spent.append(0.0005 + rows * row_s)
            pace.add_piece(rows, spent[-1])
        else:
            spent.append(0.0)

    late = spent[100:]
    assert max(late) < 0.2 * step_s
    assert sum(late) <= 0.2 * step_s * len(late)
    assert rows == 200 or sum(late) > 0.08 * step_s * len(late), "the share is used"


def test_a_piece_that_costs_more_than_a_share_waits_for_the_credit_of_several_steps() -> None:
    pace = Pace()
    pace.add_step(0.04)
    pace.add_piece(16, 0.04)  # as much as a whole step

    waited = 0
    while not pace.allows(16):
        pace.add_step(0.04)
        waited += 1

    assert 10 < waited < 40


def _item(request_id: str, length: int, queued_s: float = 0.0, index: int = 0, client: str | None = None) -> Item:
    return Item(request_id, index, [1] * length, queued_s, client=client)


def _batcher(window_s: float = 0.01, max_batch_tokens: int = 64, max_batch_size: int = 4) -> Batcher:
    return Batcher(window_s=window_s, max_batch_tokens=max_batch_tokens, max_batch_size=max_batch_size)


def _names(batch: list[Item]) -> str:
    return "".join(item.request_id for item in batch)


def test_an_input_waits_for_others_until_its_window_is_over() -> None:
    batcher = _batcher()
    assert batcher.due_s() is None
    batcher.add([_item("a", 5, 1.0), _item("b", 6, 1.005)])
    assert batcher.due_s() == 1.01
    assert batcher.take(1.009) == []
    assert _names(batcher.take(1.01)) == "ab"
    assert batcher.due_s() is None


def test_a_full_batch_does_not_wait() -> None:
    batcher = _batcher()
    batcher.add([_item(name, 5) for name in "abcde"])
    assert _names(batcher.take(0.0)) == "abcd"
    assert batcher.take(0.0) == []
    assert _names(batcher.take(0.01)) == "e"


def test_a_batch_is_full_by_tokens_with_the_padding_counted() -> None:
    batcher = _batcher(max_batch_tokens=64)
    batcher.add([_item("a", 30), _item("b", 32), _item("c", 17)])
    assert _names(batcher.take(0.0)) == "ab"


def test_an_input_longer_than_a_batch_is_computed_alone() -> None:
    batcher = _batcher(max_batch_tokens=64)
    batcher.add([_item("a", 100), _item("b", 100)])
    assert _names(batcher.take(0.0)) == "a"


def test_short_and_long_inputs_do_not_share_a_batch_and_the_oldest_goes_first() -> None:
    batcher = _batcher(max_batch_tokens=1000)
    batcher.add([_item("s", 4, 0.0), _item("L", 40, 0.001), _item("t", 3, 0.002)])
    assert _names(batcher.take(1.0)) == "st"
    assert _names(batcher.take(1.0)) == "L"


def test_a_request_taken_back_leaves_nothing_behind() -> None:
    batcher = _batcher()
    batcher.add([_item("a", 5, index=0), _item("b", 5), _item("a", 60, index=1)])
    batcher.remove("a")
    batcher.remove("unknown")
    assert _names(batcher.take(1.0)) == "b"
    assert batcher.due_s() is None


@pytest.mark.parametrize("max_batch_size", [1, 3, 8])
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 0.1)), max_size=40))
def test_every_item_leaves_once_within_bounds_and_never_after_the_window(
    max_batch_size: int, arrivals: list[tuple[int, float]]
) -> None:
    batcher = _batcher(max_batch_size=max_batch_size)
    arrivals.sort(key=lambda arrival: arrival[1])
    seen: list[int] = []
    for index, (length, at) in enumerate(arrivals):
        batcher.add([_item("a", length, at, index)])
    while (due := batcher.due_s()) is not None:
        batch = batcher.take(due)
        assert 1 <= len(batch) <= max_batch_size
        longest = max(len(item.token_ids) for item in batch)
        assert len(batch) == 1 or len(batch) * longest <= 64
        assert longest < 2 * min(len(item.token_ids) for item in batch) or longest == 1
        assert due <= min(item.queued_s for item in batch) + 0.01
        seen += [item.index for item in batch]
    assert sorted(seen) == list(range(len(arrivals)))


def test_a_batch_is_cut_to_the_tokens_that_are_left_but_never_to_nothing() -> None:
    batcher = _batcher()
    batcher.add([_item(name, 5) for name in "abcd"])
    assert _names(batcher.take(0.01, max_tokens=11)) == "ab"
    assert _names(batcher.take(0.01, max_tokens=3)) == "c"
    assert _names(batcher.take(0.01)) == "d"


def test_one_clients_thousand_inputs_do_not_delay_another_client() -> None:
    batcher = _batcher()
    batcher.add([_item("m", 5, index=index, client="many") for index in range(1000)])
    assert _names(batcher.take(0.0)) == "mmmm"
    batcher.add([_item(name, length, 0.0, client="few") for name, length in (("a", 5), ("b", 7), ("c", 30))])
    assert _names(batcher.take(0.0)) == "ambm"
    assert _names(batcher.take(1.0)) == "c", "a bucket's turn is that of its first input"
    assert _names(batcher.take(1.0)) == "mmmm"


def test_a_client_saves_up_no_turns_and_gets_back_those_of_a_request_that_it_withdraws() -> None:
    batcher = _batcher(max_batch_size=1)
    batcher.add([_item("a", 5, client="a") for _ in range(9)])
    for _ in range(5):
        assert _names(batcher.take(0.0)) == "a"
    batcher.add([_item("x", 5, client="b", index=index) for index in range(50)])
    batcher.remove("x")
    batcher.add([_item("b", 5, client="b") for _ in range(4)])
    assert "".join(_names(batcher.take(0.0)) for _ in range(8)) in {"abababab", "babababa"}


def test_a_request_can_be_withdrawn_after_others_have_overtaken_it() -> None:
    batcher = _batcher()
    batcher.add([_item("s", 2, 1.0, client="a")])
    batcher.add([_item("m", 60, 1.0, client="b") for _ in range(9)])
    assert _names(batcher.take(1.0)) == "m", "full, while the short one waits for others"
    batcher.take(1.0)
    batcher.remove("s")
    assert _names(batcher.take(2.0)) == "m"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 60)), min_size=2, max_size=60))
def test_clients_that_wait_get_equal_tokens_but_for_a_batch_and_an_input(arrivals: list[tuple[str, int]]) -> None:
    """The bound of start-time fair queueing: the longest input of each client; and batches are of one length."""
    batcher = _batcher(max_batch_size=1)
    batcher.add([_item(client, length, client=client) for client, length in arrivals])
    waiting, tokens = Counter(client for client, _ in arrivals), Counter[str]()
    while waiting["a"] and waiting["b"]:
        (item,) = batcher.take(0.0)
        tokens[item.request_id] += len(item.token_ids)
        waiting[item.request_id] -= 1
        assert abs(tokens["a"] - tokens["b"]) <= 2 * 60


pytestmark = pytest.mark.slow

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


def test_vectors_of_a_decoder_go_through_its_modules(tmp_path: Path) -> None:
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
    engine = load_engine(EngineConfig(model=tmp_path, dtype="float32", threads=1, max_model_len=128))
    assert (engine.ready.task, engine.ready.embedding_size) == ("generate", 10)
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
