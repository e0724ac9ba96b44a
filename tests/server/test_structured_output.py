"""Answers under a grammar, drawn at random by a model that knows nothing: they parse and validate all the same."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from llmservice_server.engine.block_pool import PreemptionCost
from llmservice_server.engine.config import EngineConfig
from llmservice_server.runtime.startup import load_engine
from llmservice_server.sampling.grammar import TOO_COMPLEX, regex_grammar
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.types.messages import GenerateRequest, Output, SamplingParams

pytestmark = pytest.mark.slow

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user", None]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,5}$"}, "maxItems": 3},
        "born": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {"node": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"$ref": "#/$defs/node"}}]}},
    "$ref": "#/$defs/node",
}
CHOICE = {"oneOf": [{"const": "yes"}, {"const": "no"}]}


def grammar(schema: dict[str, Any]) -> str:
    """Without white space, which a model that draws at random would never stop writing."""
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


class Driver:
    """An engine, and what it has said by request."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.engine = load_engine(EngineConfig(model=model, threads=1, **settings))
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.last: dict[str, Output] = {}

    def add(self, request_id: str, **sampling: Any) -> None:
        message = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=[0, 70, 80, 90],
            sampling=SamplingParams(**{"max_tokens": 200, "stop_token_ids": (1,)} | sampling),
            arrival_s=0.0,
        )
        self.engine.add(message)

    def run(self) -> None:
        while self.engine.has_work:
            for output in self.engine.step().outputs:
                self.tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    self.last[output.request_id] = output


@pytest.mark.parametrize(
    ("schema", "overlap"),
    [(PERSON, False), (TREE, False), (CHOICE, False), (PERSON, True)],
    ids=["person", "tree", "choice", "overlapped"],
)
def test_whatever_is_drawn_the_answer_validates(tiny_model: Path, schema: dict[str, Any], overlap: bool) -> None:
    driver, tokenizer = Driver(tiny_model, max_num_seqs=32, overlap=overlap), Tokenizer.load(tiny_model)
    for seed in range(48):
        driver.add(f"r{seed}", grammar=grammar(schema), seed=seed, temperature=1.0 if seed % 2 else 3.0)
    driver.run()
    complete = [name for name, output in driver.last.items() if output.finish_reason == "stop"]
    assert len(complete) > 40  # the others ran into max_tokens
    answers = [json.loads(tokenizer.decode(driver.tokens[name])) for name in complete]
    for answer in answers:
        jsonschema.validate(answer, schema, format_checker=jsonschema.FormatChecker())
    assert len({json.dumps(answer) for answer in answers}) > 1


@pytest.mark.parametrize("overlap", [False, True], ids=["apart", "overlapped"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_seeded_answer_under_a_grammar_is_the_same_alone_in_a_crowd_and_after_preemption(
    tiny_model: Path, mode: str, overlap: bool
) -> None:
    sampling = {"grammar": grammar(PERSON), "seed": 11, "presence_penalty": 0.3, "repetition_penalty": 1.2}
    alone = Driver(tiny_model)
    alone.add("seeded", **sampling)
    alone.run()
    pool = {"kv_cache_memory_bytes": 18 * 2 * 2 * 16 * 2 * 16 * 4, "swap_space_gib": 0.001 if mode == "swap" else 0}
    crowd = Driver(tiny_model, max_num_seqs=4, max_model_len=256, overlap=overlap, expected_tokens=1, **pool)
    if crowd.engine.swap is not None:
        crowd.engine.swap.cost = PreemptionCost(copy_block_s=0.0, compute_token_s=1.0)  # always
    for number in range(3):
        crowd.add(f"free {number}", temperature=1.0, max_tokens=200, stop_token_ids=())
    crowd.add("seeded", **sampling)
    crowd.add("other", grammar=grammar(TREE), seed=1)
    crowd.run()
    assert crowd.engine.stats().preemptions[mode] > 0
    assert crowd.tokens["seeded"] == alone.tokens["seeded"]
    assert crowd.last["seeded"].finish_reason == alone.last["seeded"].finish_reason


def test_a_sentence_that_nothing_can_follow_ends_without_another_step(tiny_model: Path) -> None:
    driver = Driver(tiny_model)
    driver.add("r", grammar=LLMatcher.grammar_from_regex("[0-9]"), max_tokens=50)
    driver.run()
    assert len(driver.tokens["r"]) == 1
    assert driver.last["r"].finish_reason == "stop"


def test_a_grammar_that_cannot_be_used_is_refused_and_affects_no_other(tiny_model: Path) -> None:
    driver = Driver(tiny_model)
    driver.add("wrong", grammar=LLMatcher.grammar_from_json_schema({"type": "strin"}))
    driver.add("right", grammar=grammar(CHOICE))
    driver.run()
    assert (driver.last["wrong"].finish_reason, driver.last["wrong"].error_status) == ("error", 400)
    assert driver.last["wrong"].error == "Invalid type: strin"
    assert driver.last["right"].finish_reason == "stop"
    assert driver.engine.stats().blocks_held == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["apart", "overlapped"])
def test_a_grammar_that_turns_out_too_complex_fails_its_own_request_only(tiny_model: Path, overlap: bool) -> None:
    driver = Driver(tiny_model, overlap=overlap)
    many = {"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(3000)}}
    driver.add("complex", grammar=grammar(many))
    driver.add("right", grammar=grammar(CHOICE))
    driver.run()
    assert (driver.last["complex"].finish_reason, driver.last["complex"].error_status) == ("error", 400)
    assert "too complex" in str(driver.last["complex"].error)
    assert driver.last["right"].finish_reason == "stop"
    assert driver.engine.stats().blocks_held == 0


def test_a_pattern_that_would_slow_every_step_is_refused_before_it_joins_one(tiny_model: Path) -> None:
    driver = Driver(tiny_model)
    driver.add("slow", grammar=regex_grammar("(a{2000}){2000}"))
    driver.add("right", grammar=regex_grammar("(yes|no)"))
    driver.run()
    assert (driver.last["slow"].finish_reason, driver.last["slow"].error_status) == ("error", 400)
    assert driver.last["slow"].error == TOO_COMPLEX
    assert driver.last["right"].finish_reason == "stop"


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(tiny_model: Path) -> None:
    driver = Driver(tiny_model)
    many = {"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(3000)}}
    driver.add("slow", grammar=grammar(many))
    driver.engine.abort(["slow"])
    driver.add("next", grammar=grammar(CHOICE))
    driver.run()
    assert driver.last["slow"].finish_reason == "abort"
    assert driver.last["next"].finish_reason == "stop"
