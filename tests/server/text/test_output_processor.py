"""The engine's outputs become answers: pieces or whole, ended by stop strings, counted and timed."""

from __future__ import annotations

from typing import Any

import pytest

from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor, RequestState
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.tiny import tokenizer as tiny_tokenizer
from llmservice_server.types.messages import GenerateRequest, Output, SamplingParams, TokenLogprobs

LIBRARY = tiny_tokenizer.train(1024)
TOKENIZER = Tokenizer(LIBRARY, eos_token_ids=frozenset({2}))


class Records:
    """What a recorder received, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def record_first_tokens(self, state: RequestState, num_tokens: int) -> None:
        self.events.append(("first", state.index, num_tokens, state.ttft_s, state.queue_s))

    def record_tokens(self, num_tokens: int, since_last_s: float) -> None:
        self.events.append(("next", num_tokens, since_last_s))

    def record_finished(self, state: RequestState) -> None:
        self.events.append(("finished", state.index, state.finish_reason))


def _ids(text: str) -> list[int]:
    ids: list[int] = LIBRARY.encode(text, add_special_tokens=False).ids
    return ids


def _processor(*prompts: SamplingParams, final_only: bool = False) -> tuple[OutputProcessor, Records]:
    records = Records()
    requests = [
        GenerateRequest(request_id="r", prompt_token_ids=[5] * (3 + number), sampling=params, arrival_s=100.0)
        for number, params in enumerate(prompts)
    ]
    return OutputProcessor(requests, TOKENIZER, records, final_only=final_only), records


def _run(processor: OutputProcessor, text: str, **last: Any) -> list[CompletionOutput]:
    """One token a step to the first answer, the last one with `last`."""
    ids = _ids(text)
    pieces = []
    for step, token_id in enumerate(ids):
        output = Output(request_id="r-0", token_ids=[token_id], **(last if step == len(ids) - 1 else {}))
        pieces += processor.process([output], 101.0 + step)
    return pieces


def test_each_answer_is_a_request_with_a_seed_and_an_end_of_its_own() -> None:
    other = SamplingParams(ignore_eos=True, stop_token_ids=(9,))
    processor, _ = _processor(SamplingParams(n=2, seed=7, stop="x"), other)
    requests = processor.requests
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2"]
    assert [len(request.prompt_token_ids) for request in requests] == [3, 3, 4]
    assert [request.sampling for request in requests] == [
        SamplingParams(seed=7, stop_token_ids=(2,)),
        SamplingParams(seed=8, stop_token_ids=(2,)),
        other,
    ]


@pytest.mark.parametrize("final_only", [False, True])
def test_pieces_joined_are_the_whole_answer(final_only: bool) -> None:
    processor, _ = _processor(SamplingParams(), final_only=final_only)
    text = "two 🎉 words"
    pieces = _run(processor, text, finish_reason="length")
    assert "".join(piece.text for piece in pieces) == text
    assert [token_id for piece in pieces for token_id in piece.token_ids] == _ids(text)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(piece.text for piece in pieces)
    assert (len(pieces) == 1) == final_only
    assert (processor.num_unfinished, processor.num_tokens) == (0, len(_ids(text)))


def test_log_probabilities_of_held_text_come_with_the_text() -> None:
    processor, _ = _processor(SamplingParams(stop="AB"))
    first, second = (TokenLogprobs(token_id, -1.0, []) for token_id in _ids("AC"))
    held = processor.process([Output(request_id="r-0", token_ids=[first.token_id], logprobs=(first,))], 101.0)
    [piece] = processor.process([Output(request_id="r-0", token_ids=[second.token_id], logprobs=(second,))], 102.0)
    assert held == []
    assert (piece.text, piece.logprobs) == ("AC", (first, second))


def test_a_stop_string_ends_the_answer_once_and_later_outputs_are_ignored() -> None:
    processor, records = _processor(SamplingParams(stop=["STOP"]))
    pieces = _run(processor, "one STOP two three")
    assert "".join(piece.text for piece in pieces) == "one "
    assert pieces[-1].finish_reason == "stop"
    assert processor.take_stopped() == ["r-0"]
    assert processor.take_stopped() == processor.close() == []
    assert [event for event in records.events if event[0] == "finished"] == [("finished", 0, "stop")]


def test_no_stop_string_is_found_within_min_tokens() -> None:
    text = "x x x"
    processor, _ = _processor(SamplingParams(stop=["x"], min_tokens=len(_ids(text))))
    assert "".join(piece.text for piece in _run(processor, text, finish_reason="length")) == text


def test_counts_and_times_are_recorded() -> None:
    processor, records = _processor(SamplingParams(n=2), SamplingParams())
    processor.process([Output(request_id="r-1", token_ids=[70], queue_s=0.25, num_cached_tokens=2)], 101.5)
    processor.process([Output(request_id="r-1", token_ids=[71, 72]), Output(request_id="other", token_ids=[5])], 102.0)
    assert records.events == [("first", 1, 1, 1.5, 0.25), ("next", 2, 0.5)]
    assert (processor.num_prompt_tokens, processor.num_cached_tokens, processor.num_tokens) == (7, 2, 3)
    assert processor.ttft_s == 1.5
    assert processor.close("error") == ["r-0", "r-1", "r-2"]
    assert records.events[2:] == [("finished", index, "error") for index in range(3)]


def test_an_error_is_passed_on_with_its_status() -> None:
    processor, _ = _processor(SamplingParams())
    [piece] = processor.process([Output(request_id="r-0", finish_reason="error", error="why", error_status=504)], 101.0)
    assert (piece.finish_reason, piece.error, piece.error_status) == ("error", "why", 504)


def test_a_request_without_tokens_to_generate_only_scores_its_prompt() -> None:
    processor, records = _processor(SamplingParams(max_tokens=0))
    assert processor.requests[0].sampling.max_tokens == 1
    scores = (TokenLogprobs(5, -1.0, []),)
    output = Output(request_id="r-0", token_ids=[70], finish_reason="stop", prompt_logprobs=scores)
    [piece] = processor.process([output], 101.0)
    assert (piece.text, piece.token_ids, piece.finish_reason) == ("", (), "length")
    assert processor.states[0].prompt_logprobs == scores
    assert [event[0] for event in records.events] == ["finished"]


@pytest.mark.parametrize("settings", [{"n": 0}, {"stop": ""}, {"stop": ["a", ""]}])
def test_parameters_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"n is 0|empty string"):
        SamplingParams(**settings)
