"""On a device that computes late: sampling never waits for it."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from harness.gpu.late_device import CUDA, late_device
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
    with late_device() as device:
        logits = torch.zeros(len(requests), VOCAB, device=CUDA)
        drawn = Sampler(torch_sampler.choose, torch_sampler.penalize).draw(logits, requests)
        assert device.num_waits == 0
        assert all(0 <= token_id < VOCAB for token_id in drawn.wait().token_ids)


def test_a_grammars_mask_is_copied_without_waiting() -> None:
    masks: Future[torch.Tensor] = Future()
    masks.set_result(torch.zeros(2, (VOCAB + 31) // 32, dtype=torch.int32))
    with late_device() as device:
        logits = torch.zeros(3, VOCAB, device=CUDA)
        apply_masks(logits, [0, 2], masks.result())
        assert device.num_waits == 0
        assert logits.isinf().all(dim=1).tolist() == [True, False, True]
