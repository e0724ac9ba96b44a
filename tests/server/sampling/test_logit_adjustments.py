"""What changes logits before sampling, against its formulas, written out one token at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_server.backend.cpu.sampler import penalize as cpu_penalize
from llmservice_server.backend.torch.sampler import penalize as torch_penalize
from llmservice_server.engine.request import Request, TokenHistory
from llmservice_server.sampling import logit_adjustments
from llmservice_server.sampling.penalties import Penalties
from llmservice_server.types.messages import GenerateRequest, SamplingParams

VOCAB = 12
PENALIZE = {"torch": torch_penalize, "cpu": cpu_penalize}


def adjust(logits: torch.Tensor, requests: list[Request], penalties: Penalties | None = None) -> None:
    logit_adjustments.adjust(logits, requests, penalties or Penalties(torch_penalize))


def request(prompt: list[int], answer: list[int], **sampling: Any) -> Request:
    message = GenerateRequest(
        request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=99, **sampling), arrival_s=0.0
    )
    made = Request.of(message, 0, seed=0, eos_token_ids=frozenset())
    for token in answer:
        made.append(token)
    return made


def ends_with(answer: list[int], tokens: tuple[int, ...]) -> bool:
    return tuple(answer[len(answer) - len(tokens) :]) == tokens


def expected(logits: list[float], asked: Request) -> list[float]:
    """By definition: repetition on all that was seen, presence and frequency on the answer, then bias, then bars."""
    sampling = asked.sampling
    answer = asked.token_ids[asked.num_prompt_tokens :]
    bad = {word[-1] for word in sampling.bad_words if len(answer) >= len(word) - 1 and ends_with(answer, word[:-1])}
    stops = asked.stop_token_ids if len(answer) < sampling.min_tokens else set[int]()
    left = {*(sampling.allowed_token_ids or range(VOCAB))} - stops
    result = []
    for token, logit in enumerate(logits):
        if token in asked.token_ids:
            penalty = sampling.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty  # noqa: PLW2901 - step by step, as defined
        count = answer.count(token)
        adjusted = logit - sampling.presence_penalty * (count > 0) - sampling.frequency_penalty * count
        adjusted += sampling.logit_bias.get(token, 0.0)
        if token in stops:
            adjusted = -math.inf
        if sampling.allowed_token_ids and token not in sampling.allowed_token_ids:
            adjusted = -math.inf
        if token in bad and not bad.issuperset(left):
            adjusted = -math.inf
        result.append(adjusted)
    return result


TOKEN = st.integers(0, VOCAB - 1)
NUMBER = st.floats(-2, 2)
REQUEST = st.builds(
    request,
    prompt=st.lists(TOKEN, min_size=1, max_size=8),
    answer=st.lists(TOKEN, max_size=8),
    presence_penalty=NUMBER | st.just(0.0),
    frequency_penalty=NUMBER | st.just(0.0),
    repetition_penalty=st.floats(0.1, 3) | st.just(1.0),
    logit_bias=st.dictionaries(TOKEN, st.floats(-100, 100), max_size=4),
    min_tokens=st.integers(0, 10),
    stop_token_ids=st.lists(TOKEN, max_size=3).map(tuple),
    allowed_token_ids=st.lists(TOKEN, max_size=4, unique=True).map(tuple),
    bad_words=st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
)


@settings(deadline=None)  # torch's first call is slow
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    backend=st.sampled_from(sorted(PENALIZE)),
)
def test_every_row_is_changed_by_its_own_requests_formula_and_by_nothing_else(
    requests: list[Request], seed: int, backend: str
) -> None:
    logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    wanted = [expected(row, asked) for row, asked in zip(logits.tolist(), requests, strict=True)]
    adjust(logits, requests, Penalties(PENALIZE[backend]))
    torch.testing.assert_close(logits, torch.tensor(wanted), rtol=1e-5, atol=1e-5)


def test_a_bad_word_passes_where_min_tokens_bars_the_only_other_token_that_is_allowed() -> None:
    barring = {"allowed_token_ids": (3, 4), "bad_words": ((3, 3),), "stop_token_ids": (4,), "min_tokens": 2}
    logits = torch.zeros(2, VOCAB)
    adjust(logits, [request([0], [3], **barring), request([0], [3, 3], **barring)])
    assert [row.isfinite().nonzero().flatten().tolist() for row in logits] == [[3], [4]]


@settings(deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=12),
    steps=st.lists(st.tuples(st.sets(st.integers(0, 11), min_size=1), TOKEN), min_size=1, max_size=12),
    backend=st.sampled_from(sorted(PENALIZE)),
)
def test_counts_follow_requests_that_grow_leave_and_return(
    requests: list[Request], steps: list[tuple[set[int], int]], backend: str
) -> None:
    penalties = Penalties(PENALIZE[backend])
    for present, token in steps:
        batch = [request for number, request in enumerate(requests) if number in present]
        logits = torch.linspace(-3, 3, len(batch) * VOCAB).view(len(batch), VOCAB)
        wanted = [expected(row, asked) for row, asked in zip(logits.tolist(), batch, strict=True)]
        adjust(logits, batch, penalties)
        torch.testing.assert_close(logits, torch.tensor(wanted).view(len(batch), VOCAB), rtol=1e-5, atol=1e-5)
        for request in batch:
            request.append(token)


class FailingHistory(TokenHistory):
    """Its counts cannot be read when `fails`."""

    fails = False

    def __getattribute__(self, name: str) -> Any:
        if name == "counts" and self.fails:
            raise MemoryError
        return super().__getattribute__(name)


@pytest.mark.parametrize("were_known", [False, True])
def test_counts_are_right_after_a_step_that_failed_while_they_were_written(were_known: bool) -> None:
    penalties = Penalties(torch_penalize)
    batch = [request([1, 2, 3], [4], frequency_penalty=1.0), request([6], [], presence_penalty=1.0)]
    history = batch[1].history = FailingHistory([6], 99)
    if were_known:
        adjust(torch.ones(2, VOCAB), batch, penalties)
    for asked in batch:
        asked.append(5)
    history.fails = True
    with pytest.raises(MemoryError):
        adjust(torch.ones(2, VOCAB), batch, penalties)
    history.fails = False
    logits = torch.linspace(-3, 3, 2 * VOCAB).view(2, VOCAB)
    wanted = [expected(row, asked) for row, asked in zip(logits.tolist(), batch, strict=True)]
    adjust(logits, batch, penalties)
    torch.testing.assert_close(logits, torch.tensor(wanted), rtol=1e-5, atol=1e-5)


@settings(deadline=None)  # torch's first call is slow
@given(requests=st.lists(REQUEST, min_size=2, max_size=5))
def test_a_row_comes_out_bit_for_bit_alike_alone_and_in_a_batch(requests: list[Request]) -> None:
    logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(1))
    alone = [logits[row : row + 1].clone() for row in range(len(requests))]
    for row, asked in zip(alone, requests, strict=True):
        adjust(row, [asked])
    adjust(logits, requests)
    assert torch.equal(logits, torch.cat(alone))


def test_stop_tokens_are_barred_until_there_are_enough_tokens() -> None:
    for answer, barred in (([], True), ([1], True), ([1, 1], False)):
        logits = torch.zeros(1, VOCAB)
        adjust(logits, [request([1], answer, min_tokens=2, stop_token_ids=(3, 7, VOCAB + 5))])
        assert logits.isinf().nonzero()[:, 1].tolist() == ([3, 7] if barred else [])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"stop_token_ids": (3,)}, {"top_p": 0.5}])
def test_a_request_that_asks_for_nothing_keeps_its_logits(sampling: dict[str, Any]) -> None:
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    asked = request([1, 2], [3] if "stop_token_ids" not in sampling else [4], **sampling)
    adjust(logits, [asked])
    assert torch.equal(logits, before)
    assert asked.history is None
