"""Estimated tokens, and which requests share the beginning of their prompts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_gateway.routing.demand import AFFINITY_CHARS, Demand, Estimator, Usage, affinity


def chat(*texts: str, system: str = "be brief", **fields: Any) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"messages": [{"role": "system", "content": system}, *messages], **fields}


def key(payload: dict[str, Any], model: str = "default/llama", session: str | None = None) -> bytes | None:
    return affinity(model, payload, session, generates=True)


def test_all_turns_of_a_conversation_have_one_key() -> None:
    assert key(chat("hello")) == key(chat("hello", "hi", "and now?")) is not None


@pytest.mark.parametrize(
    "other",
    [
        key(chat("good morning")),
        key(chat("hello", system="be long")),
        key(chat("hello", cache_salt="s")),
        key(chat("hello"), model="default/poet"),
        key(chat("hello"), session="s"),
        key({"prompt": "hello"}),
        affinity("default/llama", {"input": "hello"}, None, generates=False),
    ],
    ids=["first message", "system", "salt", "model", "session", "endpoint", "no prompt"],
)
def test_what_begins_otherwise_has_another_key(other: bytes | None) -> None:
    assert key(chat("hello")) != other


def test_a_response_has_the_key_of_the_same_chat() -> None:
    asked = {"instructions": "be brief", "input": [{"role": "user", "content": "hello"}, {"type": "reasoning"}]}
    assert key(asked) == key(chat("hello"))
    assert key({**asked, "input": "hello"}) == key(chat("hello")) != key({"input": "hello"})
    demand = Estimator().demand({**asked, "max_output_tokens": 7}, generates=True, affinity=None)
    assert (demand.prompt_tokens > 0, demand.max_output_tokens) == (True, 7)


def test_a_session_replaces_what_the_body_says() -> None:
    assert key(chat("a"), session="s") == key({"prompt": "b"}, session="s") != key(chat("a"), session="t")


def test_a_prompt_counts_by_its_beginning() -> None:
    start = "x" * AFFINITY_CHARS
    assert key({"prompt": start + "a"}) == key({"prompt": start + "b"}) == key({"prompt": [start + "a", "c"]})
    assert key({"prompt": "y" + start}) != key({"prompt": start})
    assert key({"prompt": [1, 2, 3]}) != key({"prompt": [1, 2, 4]})
    assert key({"prompt": ""}) is key({"model": "m"}) is key({"messages": []}) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=()), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    ["messages", "prompt", "input", "instructions", "n", "max_tokens", "cache_salt", "tools", "documents"]
)


@given(st.dictionaries(fields, json_values), st.booleans())
def test_any_body_has_a_demand(payload: dict[str, Any], generates: bool) -> None:
    found = affinity("m", payload, None, generates=generates)
    demand = Estimator().demand(payload, generates=generates, affinity=found)
    assert demand.prompt_tokens >= 0
    assert demand.output_tokens >= int(generates)
    assert demand.max_output_tokens is None or demand.max_output_tokens >= demand.output_tokens


def test_estimates_follow_what_pods_report() -> None:
    estimator = Estimator()
    payload = {"prompt": "x" * 400, "max_tokens": 50, "n": 2}
    demand = estimator.demand(payload, generates=True, affinity=None)
    assert demand == Demand(100, 100, 100)
    for _ in range(3):
        estimator.learn(demand, Usage(prompt=200, cached=0, completion=20))
    assert estimator.demand(payload, generates=True, affinity=None) == Demand(200, 20, 100)
    assert estimator.demand({"prompt": [1, 2, 3]}, generates=True, affinity=None) == Demand(3, 10, None)
    assert estimator.demand({"input": "x" * 400}, generates=False, affinity=None) == Demand(200, 0, 0)


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("query", "documents"), ("query", "texts")]
)
def test_pairs_count_with_both_sides(names: tuple[str, str]) -> None:
    payload = {names[0]: "x" * 40, names[1]: ["x" * 180, "x" * 180]}
    assert Estimator().demand(payload, generates=False, affinity=None) == Demand(100, 0, 0)


def test_images_are_no_text() -> None:
    parts = [{"type": "text", "text": "x" * 400}, {"type": "image_url", "image_url": {"url": "x" * 100_000}}]
    demand = Estimator().demand({"messages": [{"role": "user", "content": parts}]}, generates=True, affinity=None)
    assert 100 <= demand.prompt_tokens < 110


@pytest.mark.parametrize(
    ("text", "usage"),
    [("7 3 2", Usage(7, 3, 2)), ("7 3", None), ("", None), ("7 -3 2", None), ("7 3 ²", None), ("a b c", None)],
)
def test_a_report_of_usage_is_three_numbers(text: str, usage: Usage | None) -> None:
    assert Usage.parse(text) == usage


def test_absurd_figures_of_a_request_are_bounded() -> None:
    demand = Estimator().demand({"prompt": "x", "n": 10**400, "max_tokens": 10**400}, generates=True, affinity=None)
    assert demand.output_tokens < 2**20
    assert demand.max_output_tokens is not None
    assert demand.max_output_tokens < 2**32
