from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmservice_server.backend.cpu import sampler as cpu_sampler
from llmservice_server.backend.sampling_batch import SamplingBatch
from llmservice_server.backend.torch import sampler as torch_sampler
from llmservice_server.engine.request import Request
from llmservice_server.sampling.sampler import Logprobs, Sampler
from llmservice_server.types.messages import GenerateRequest, SamplingParams

pytestmark = pytest.mark.slow

VOCAB = 3000  # more than the candidates that are sorted first

Sample = Callable[[torch.Tensor, list[Request]], list[int | None]]


@pytest.fixture(params=[cpu_sampler.choose, torch_sampler.choose], ids=["cpu", "torch"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Each of the samplers, on the CPU; None where a row is not finite."""

    def sample(logits: torch.Tensor, requests: list[Request]) -> list[int | None]:
        chosen = request.param(logits, SamplingBatch.of(requests)).tolist()
        return [None if token_id < 0 else token_id for token_id in chosen]

    return sample


def request(seed: int = 0, place: int = 0, **sampling: Any) -> Request:
    """A request that is about to sample the token at `place` of its answer."""
    message = GenerateRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=100, seed=seed, **sampling),
        arrival_s=0.0,
    )
    made = Request.of(message, 0, seed=0, eos_token_ids=frozenset())
    for _ in range(place):
        made.append(1)
    return made


def random_logits(rows: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def allowed(logits: torch.Tensor, top_k: int, top_p: float, temperature: float) -> set[int]:
    """The tokens that top-k, then top-p over what is left, allow: by definition, one at a time."""
    weights = (logits.double() / temperature).softmax(-1).tolist()
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])[: top_k or None]
    mass = sum(weights[token] for token in ranked)
    kept, sum_before = set(), 0.0
    for token in ranked:
        if kept and sum_before >= top_p * mass:
            break
        kept.add(token)
        sum_before += weights[token]
    return kept


def draws(sample: Sample, logits: torch.Tensor, count: int, **sampling: Any) -> Counter[int]:
    """`count` draws from one row of logits."""
    drawn = sample(logits.repeat(count, 1), [request(seed=number, **sampling) for number in range(count)])
    return Counter(token for token in drawn if token is not None)


def test_temperature_zero_takes_the_top_token(sample: Sample) -> None:
    logits = random_logits(5)
    assert sample(logits.clone(), [request(temperature=0.0) for _ in range(5)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_sampled_as_often_as_the_softmax_says(sample: Sample, temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]])
    expected = (logits[0] / temperature).softmax(-1).tolist()
    counts = draws(sample, logits, 5000, temperature=temperature)
    for token, probability in enumerate(expected):
        deviation = math.sqrt(probability * (1 - probability) / 5000)
        assert abs(counts[token] / 5000 - probability) < 5 * deviation + 1e-9


@pytest.mark.parametrize(
    ("top_k", "top_p", "spread"),
    [
        (1, 1.0, 2.0),
        (7, 1.0, 2.0),
        (0, 0.5, 2.0),
        (0, 0.0, 2.0),
        (40, 0.6, 2.0),
        (0, 0.9, 0.1),  # nearly flat: the nucleus is wider than the candidates sorted first
        (2000, 0.99, 0.1),
        (VOCAB + 5, 1.0, 2.0),  # as good as off
    ],
)
def test_only_tokens_that_top_k_and_top_p_allow_are_drawn_and_all_likely_ones_are(
    sample: Sample, top_k: int, top_p: float, spread: float
) -> None:
    logits = random_logits(1, spread=spread)
    permitted = allowed(logits[0], top_k, top_p, temperature=0.7)
    counts = draws(sample, logits, 1000, top_k=top_k, top_p=top_p, temperature=0.7)
    assert set(counts) <= permitted
    weights = {token: float(logits[0, token] / 0.7) for token in permitted}
    total = sum(map(math.exp, weights.values()))
    likely = {token for token, weight in weights.items() if math.exp(weight) / total > 0.01}
    assert likely <= set(counts)


@pytest.mark.parametrize(("min_p", "temperature"), [(0.0, 1.0), (0.1, 1.0), (0.3, 0.5), (0.05, 2.0), (1.0, 1.0)])
def test_min_p_leaves_the_tokens_that_have_this_share_of_the_likeliests_probability(
    sample: Sample, min_p: float, temperature: float
) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, -0.4, -2.0]])
    probabilities = (logits[0] / temperature).softmax(-1).tolist()
    permitted = {token for token, p in enumerate(probabilities) if p >= min_p * max(probabilities)}
    assert set(draws(sample, logits, 1000, temperature=temperature, min_p=min_p)) == permitted


def test_rows_that_are_ranked_alike_but_cut_by_different_rules_do_not_disturb_each_other(sample: Sample) -> None:
    logits = random_logits(1, spread=0.01).repeat(400, 1)  # nearly flat: half the mass is half the vocabulary
    narrow = [request(seed, temperature=1.0, top_k=1000) for seed in range(200)]
    wide = [request(seed, temperature=1.0, top_p=0.9) for seed in range(200)]
    drawn = sample(logits.clone(), [*narrow, *wide])
    assert set(drawn[:200]) <= allowed(logits[0], 1000, 1.0, 1.0)
    assert drawn[200:] == [sample(logits[:1].clone(), [asked])[0] for asked in wide]
    assert not set(drawn[200:]) <= allowed(logits[0], 1024, 1.0, 1.0)


def test_logprobs_are_of_the_models_logits_whatever_changes_the_draw() -> None:
    logits = random_logits(3)
    likeliest = logits[0].argmax().item()
    asked = [
        request(temperature=0.0, logprobs=2),
        request(temperature=0.0, logprobs=1, logit_bias={7: 100.0}),
        request(temperature=1.0),
    ]
    reference = logits.log_softmax(-1)
    token_ids, logprobs, failed = (
        Sampler(torch_sampler.choose, torch_sampler.penalize).draw(logits.clone(), asked).wait()
    )
    assert not failed
    assert token_ids[:2] == [likeliest, 7]
    assert logprobs[0] is not None
    assert logprobs[0].top[0] == (likeliest, logprobs[0].logprob)
    assert len(logprobs[0].top) == 2
    assert logprobs[1] is not None
    assert logprobs[1].logprob == pytest.approx(reference[1, 7].item())
    assert logprobs[2] is None


def test_a_row_is_drawn_alike_alone_and_among_rows_with_other_parameters() -> None:
    logits = random_logits(10)
    rows = [
        request(1, temperature=0.0),
        request(2, temperature=1.0),
        request(3, temperature=1.0, top_p=0.7),
        request(4, temperature=0.3, top_k=5),
        request(5, temperature=1.5, top_k=500, top_p=0.9),
        request(6, temperature=1.0, top_p=0.99),
        request(7, temperature=5.0),
        request(8, temperature=5.0, top_p=0.95),
        request(9, temperature=1.0, min_p=0.02, top_p=0.9),
        request(10, temperature=1.2, presence_penalty=1.0, repetition_penalty=1.3, place=4),
    ]
    together = Sampler(torch_sampler.choose, torch_sampler.penalize).draw(logits.clone(), rows).wait().token_ids
    alone = [
        Sampler(torch_sampler.choose, torch_sampler.penalize)
        .draw(logits[row : row + 1].clone(), [rows[row]])
        .wait()
        .token_ids
        for row in range(10)
    ]
    assert together == [token_id for (token_id,) in alone]


def test_ties_break_alike_alone_and_in_a_crowd(sample: Sample) -> None:
    logits = torch.randint(0, 3, (6, VOCAB), generator=torch.Generator().manual_seed(0)).float()  # as bfloat16 ties do
    rows = [request(seed, temperature=1.0, top_k=top_k) for seed, top_k in enumerate((3, 3, 50, 0, 33, 64))]
    together = sample(logits.clone(), rows)
    assert together == [sample(logits[row : row + 1].clone(), [rows[row]])[0] for row in range(6)]


def test_a_tiny_temperature_is_greedy_and_does_not_overflow(sample: Sample) -> None:
    logits = random_logits(3, spread=50.0)
    assert sample(logits.clone(), [request(temperature=1e-30) for _ in range(3)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_yields_none_and_leaves_the_others_alone(sample: Sample, temperature: float) -> None:
    logits = random_logits(3)
    expected = sample(logits.clone(), [request(row, temperature=temperature) for row in range(3)])
    logits[1, 17] = torch.nan
    drawn = sample(logits, [request(row, temperature=temperature) for row in range(3)])
    assert drawn == [expected[0], None, expected[2]]


def test_a_masked_out_vocabulary_leaves_only_what_is_left(sample: Sample) -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [5, 9]] = 1.0
    assert set(draws(sample, logits, 50, temperature=1.0)) == {5, 9}


def test_the_place_in_the_answer_changes_the_draw(sample: Sample) -> None:
    logits = random_logits(1)
    places = {sample(logits.clone(), [request(place=place, temperature=3.0)])[0] for place in range(20)}
    assert len(places) > 10


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (0, 0.8, 0.0), (12, 1.0, 0.0), (20, 0.7, 0.0), (0, 0.9, 0.05)]
)
def test_allowed_tokens_are_sampled_as_often_as_its_share_of_the_rest_says(
    sample: Sample, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(1)[:, :40]
    weights = logits[0].double().softmax(-1)
    likely = logits.masked_fill(weights < min_p * weights.max(), -math.inf)
    kept = allowed(likely[0], top_k, top_p, temperature=1.0)
    count, mass = 5000, float(sum(weights[token] for token in kept))
    counts = draws(sample, logits, count, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(counts) <= kept
    for token in kept:
        probability = float(weights[token]) / mass
        deviation = math.sqrt(probability * (1 - probability) / count)
        assert abs(counts[token] / count - probability) < 5 * deviation


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"top_k": 7},
        {"top_k": 2000, "top_p": 0.95},
        {"top_p": 0.9},
        {"top_p": 0.0},
        {"min_p": 0.05},
        {"min_p": 0.01, "top_k": 90, "top_p": 0.8, "temperature": 0.6},
    ],
)
def test_both_samplers_draw_the_same_tokens(sampling: dict[str, Any]) -> None:
    batch = SamplingBatch.of([request(seed, **{"temperature": 1.0} | sampling) for seed in range(100)])
    ties = torch.randint(-4, 4, (100, VOCAB), generator=torch.Generator().manual_seed(1)).float()  # as bfloat16 has
    for logits in (random_logits(100), random_logits(100, spread=0.1), ties):
        assert torch.equal(cpu_sampler.choose(logits.clone(), batch), torch_sampler.choose(logits.clone(), batch))


def test_each_row_has_its_token_and_its_own_number_of_top_tokens() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    entries = Logprobs.of(logits, torch.tensor([4, 0, 19]), 20).as_messages([4, 0, 19], [0, 3, 20])
    reference = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(reference[row, entry.token_id]), abs=1e-5)
        ranked = reference[row].argsort(descending=True).tolist()
        assert [token for token, _ in entry.top] == ranked[: len(entry.top)]
        assert [value for _, value in entry.top] == pytest.approx(
            [float(reference[row, token]) for token, _ in entry.top], abs=1e-5
        )
    assert [entry.token_id for entry in entries] == [4, 0, 19]
    assert [len(entry.top) for entry in entries] == [0, 3, 20]


def test_there_are_no_more_top_tokens_than_the_vocabulary_has() -> None:
    [entry] = Logprobs.of(torch.zeros(1, 3), torch.tensor([1]), 20).as_messages([1], [20])
    assert len(entry.top) == 3
