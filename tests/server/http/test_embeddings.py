"""/v1/embeddings, /tokenize and /detokenize as their clients see them."""

from __future__ import annotations

import asyncio
import base64
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from llmservice_server.http.protocol.embeddings import (
    MAX_INPUTS,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
)
from llmservice_server.http.routes.embeddings import written

FEW_MEANS = ("--max-queued-embeddings", "3", "--pooling", "mean")


def test_text_list_ids_and_lists_of_ids_give_the_same_vectors(server: Any, client: openai.OpenAI) -> None:
    ids = server.post("/tokenize", {"prompt": "Hello you"})[1]["tokens"]
    vectors = [
        client.embeddings.create(model="tiny", input=given).data[0].embedding
        for given in ("Hello you", ["Hello you"], ids, [ids])
    ]
    assert len(vectors[0]) == 64
    for vector in vectors:
        assert vector == pytest.approx(vectors[0], abs=1e-5)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_floats_and_base64_hold_the_same_numbers_in_the_order_of_the_inputs(client: openai.OpenAI) -> None:
    texts = ["one", "two three four five six seven", "eight"]
    by_client = client.embeddings.create(model="tiny", input=texts)  # base64 behind the scenes
    as_floats = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert [item.index for item in as_floats.data] == [0, 1, 2]
    for ours, theirs in zip(by_client.data, as_floats.data, strict=True):
        assert ours.embedding == pytest.approx(theirs.embedding, abs=1e-6)
    assert as_floats.usage.prompt_tokens == as_floats.usage.total_tokens > len(texts)
    assert (as_floats.model, as_floats.object) == ("tiny", "list")


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_other_requests_get_their_turn_after_each_vector_that_is_written(encoding: Any) -> None:
    vectors = [np.array([number, -1e-7, 1 / 3], "<f4").tobytes() for number in range(20)]
    body = EmbeddingRequest(model="m", input="a", encoding_format=encoding)
    answer = EmbeddingList(model='"data":[]\\é', data=[], usage=EmbeddingUsage(prompt_tokens=1, total_tokens=1))
    writing = asyncio.create_task(written(answer, vectors, body))
    turns = 0
    while not writing.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= len(vectors)
    response = writing.result()
    assert (response.status_code, response.media_type) == (200, "application/json")
    found = EmbeddingList.model_validate_json(response.body)
    assert found.model_copy(update={"data": []}) == answer
    floats = [np.frombuffer(vector, "<f4").tolist() for vector in vectors]
    texts = [base64.b64encode(vector).decode() for vector in vectors]
    expected = floats if encoding == "float" else texts
    assert found.data == [Embedding(index=index, embedding=each) for index, each in enumerate(expected)]


def test_fewer_dimensions_are_the_first_ones_of_length_one_again(client: openai.OpenAI) -> None:
    whole = np.array(client.embeddings.create(model="tiny", input="a").data[0].embedding)
    short = client.embeddings.create(model="tiny", input="a", dimensions=8).data[0].embedding
    assert short == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]), abs=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "other", "input": "a"}, 404, "model"),
        ({"model": "tiny"}, 400, "input"),
        ({"model": "tiny", "input": []}, 400, "input"),
        ({"model": "tiny", "input": [[]]}, 400, "input"),
        ({"model": "tiny", "input": [1, "a"]}, 400, "input"),
        ({"model": "tiny", "input": [99999]}, 400, "input"),
        ({"model": "tiny", "input": [5] * 513}, 400, "input"),
        ({"model": "tiny", "input": ["a"] * (MAX_INPUTS + 1)}, 400, "input"),
        ({"model": "tiny", "input": "a", "dimensions": 65}, 400, "dimensions"),
        ({"model": "tiny", "input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"model": "tiny", "input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"model": "tiny", "input": "a", "normalize": False}, 400, "normalize"),
    ],
)
def test_bad_input_is_refused_in_the_shape_of_openai(server: Any, body: Any, status: int, param: str) -> None:
    got, answer = server.post("/v1/embeddings", body)
    assert got == status
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"


def test_embeddings_are_served_beside_generation_and_counted(server: Any, client: openai.OpenAI) -> None:
    before = server.metric("llmservice_embedding_inputs_total")
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    with ThreadPoolExecutor(8) as threads:
        answers = list(
            threads.map(lambda n: client.embeddings.create(model="tiny", input=["word " * n, "x"]), range(1, 33))
        )
    assert len(list(stream)) > 10  # it went on beside them, and to its end
    assert {len(answer.data) for answer in answers} == {2}
    assert server.metric("llmservice_embedding_inputs_total") == before + 64
    server.wait_until_idle()


def test_too_many_inputs_at_once_are_refused_with_a_hint(shared_server: Any) -> None:
    server = shared_server(*FEW_MEANS)
    status, answer = server.post("/v1/embeddings", {"model": "tiny", "input": ["a"] * 4})
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert server.post("/v1/embeddings", {"model": "tiny", "input": ["a"] * 3})[0] == 200


def test_mean_pooling_is_a_flag(shared_server: Any, server: Any) -> None:
    mean = shared_server(*FEW_MEANS)
    body = {"model": "tiny", "input": "one two three"}
    vectors = [each.post("/v1/embeddings", body)[1]["data"][0]["embedding"] for each in (mean, server)]
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-3)


def test_a_text_is_tokenized_and_back(server: Any) -> None:
    status, answer = server.post("/tokenize", {"model": "tiny", "prompt": "Hello you", "return_token_strs": True})
    assert status == 200
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    bare = server.post("/tokenize", {"prompt": "Hello you", "add_special_tokens": False})[1]
    assert bare["tokens"] == answer["tokens"][1:]
    assert bare["token_strs"] is None
    assert server.post("/detokenize", {"model": "tiny", "tokens": bare["tokens"]}) == (200, {"prompt": "Hello you"})


def test_a_chat_is_tokenized_as_it_would_be_served(server: Any, client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "How are you?"}]
    answer = server.post("/tokenize", {"messages": messages})[1]
    usage = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens == answer["count"]
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert server.post("/tokenize", {"messages": messages, "tools": tools})[1]["count"] > answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404),
        ("/tokenize", {"prompt": 1}, 400),
        ("/detokenize", {"tokens": [10**9]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {}, 400),
    ],
)
def test_what_cannot_be_tokenized_is_refused(server: Any, path: str, body: dict[str, Any], status: int) -> None:
    got, answer = server.post(path, body)
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_neither_the_log_nor_an_error_holds_the_texts(server: Any) -> None:
    server.post("/v1/embeddings", {"model": "tiny", "input": "a secret word"})
    server.post("/tokenize", {"prompt": "a secret word"})
    assert "secret" not in json.dumps(server.log)
