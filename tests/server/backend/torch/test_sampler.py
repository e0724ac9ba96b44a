"""On a device from which nothing can be read: sampling never waits for it."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from harness.never_waiting import META, WouldWaitError, never_waiting
from llmservice_server.backend.torch import sampler as torch_sampler
from llmservice_server.engine.request import Request
from llmservice_server.sampling.logit_adjustments import apply_masks
from llmservice_server.sampling.sampler import Sampler
from llmservice_server.types.messages import GenerateRequest, SamplingParams

VOCAB = 3000

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.9, "seed": 3},
    {"top_k": 2000, "top_p": 0.5, "min_p": 0.1},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"logit_bias": {5: 1.0, 7: -100.0}},
    {"min_tokens": 50, "stop_token_ids": (1, 2)},
    {"logprobs": 3},
]


def request(sampling: dict[str, Any]) -> Request:
    message = GenerateRequest(
        request_id="r", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=99, **sampling), arrival_s=0.0
    )
    made = Request.of(message, 0, seed=0, eos_token_ids=frozenset())
    for token in (5, 5, 9):
        made.append(token)
    return made


@pytest.mark.parametrize("asked", [*([each] for each in ASKED), ASKED], ids=lambda asked: str(asked)[:60])
def test_sampling_never_waits_for_the_device(asked: list[dict[str, Any]]) -> None:
    requests = [request(each) for each in asked]
    logits = torch.empty(len(requests), VOCAB, device=META)
    with never_waiting():
        drawn = Sampler(torch_sampler.choose, torch_sampler.penalize).draw(logits, requests)
    assert (drawn.token_ids.device, drawn.token_ids.shape) == (META, (len(requests),))


def test_a_grammars_mask_is_copied_without_waiting() -> None:
    masks: Future[torch.Tensor] = Future()
    masks.set_result(torch.zeros(2, (VOCAB + 31) // 32, dtype=torch.int32))
    with never_waiting():
        apply_masks(torch.empty(3, VOCAB, device=META), [0, 2], masks.result())


def test_the_device_of_this_test_detects_waiting() -> None:
    there = torch.zeros(4, device=META)
    for waits in (there.tolist, there.nonzero, lambda: there[there > 0], lambda: bool(there.sum() > 0)):
        with pytest.raises((RuntimeError, NotImplementedError)):
            waits()
    for copies in (
        lambda: torch.tensor([1, 2], device=META),
        lambda: there[[0, 1]],
        lambda: there.copy_(torch.ones(4)),
    ):
        with never_waiting(), pytest.raises(WouldWaitError):
            copies()
