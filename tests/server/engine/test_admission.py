import math
from typing import Any

import pytest

from llmservice_server.engine.admission import why_refused
from llmservice_server.types.messages import GenerateRequest, SamplingParams


def refusal(prompt: list[int], **sampling: Any) -> str | None:
    settings = {"max_tokens": 10} | sampling
    message = GenerateRequest(
        request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(**settings), arrival_s=0.0, lane="interactive"
    )
    return why_refused(message, vocab_size=50, max_request_tokens=20)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([0, 49], {}),
        ([1] * 10, {"max_tokens": 10}),
        ([1], {"temperature": 0.0, "top_p": 0.0, "top_k": 0}),
        ([1], {"temperature": 2.0, "top_p": 1.0, "top_k": 10_000}),
        ([1], {"allowed_token_ids": (0, 49), "bad_words": ((3,), (4, 5))}),
    ],
)
def test_what_can_be_served_is_admitted(prompt: list[int], sampling: dict[str, Any]) -> None:
    assert refusal(prompt, **sampling) is None


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "no tokens, expected at least one"),
        ([50], {}, "expected 0 to 49"),
        ([-1], {}, "expected 0 to 49"),
        ([1] * 11, {}, "11 prompt tokens and max_tokens 10 make 21, expected at most 20: shorten"),
        ([1], {"max_tokens": 0}, "max_tokens is 0, expected at least 1"),
        ([1], {"temperature": -0.1}, "temperature is -0.1"),
        ([1], {"temperature": math.nan}, "temperature is nan"),
        ([1], {"temperature": math.inf}, "temperature is inf"),
        ([1], {"top_p": 1.5}, "top_p is 1.5"),
        ([1], {"top_p": math.nan}, "top_p is nan"),
        ([1], {"top_k": -1}, "top_k is -1"),
        ([1], {"min_p": 1.1}, "min_p is 1.1"),
        ([1], {"min_p": math.nan}, "min_p is nan"),
        ([1], {"logit_bias": {50: 1.0}}, "logit_bias names a token id outside"),
        ([1], {"logit_bias": {5: math.inf}}, "expected -100 to 100"),
        ([1], {"presence_penalty": math.nan}, "presence_penalty is nan"),
        ([1], {"frequency_penalty": 2.5}, "frequency_penalty is 2.5"),
        ([1], {"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300"),
        ([1], {"min_tokens": -1}, "min_tokens is -1"),
        ([1], {"min_tokens": 2, "grammar": "{}"}, "0 beside a grammar"),
        ([1], {"allowed_token_ids": (1, 50)}, "allowed_token_ids or bad_words"),
        ([1], {"bad_words": ((1, -1),)}, "allowed_token_ids or bad_words"),
        ([1], {"bad_words": ((),)}, "allowed_token_ids or bad_words"),
        ([1], {"bad_words": ((1,),), "grammar": "{}"}, "cannot be combined with a grammar"),
        ([1], {"logprobs": 21}, "expected 0 to 20"),
        ([1], {"prompt_logprobs": -1}, "expected 0 to 20"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    prompt: list[int], sampling: dict[str, Any], message: str
) -> None:
    assert message in str(refusal(prompt, **sampling))
