"""What the engine refuses at once, because it could never serve it."""

from __future__ import annotations

import itertools

from llmservice_server.engine.request import LANES
from llmservice_server.types.messages import GenerateRequest, SamplingParams

MAX_LOGPROBS = 20  # likeliest tokens returned with each, as at OpenAI


def why_refused(message: GenerateRequest, vocab_size: int, max_request_tokens: int) -> str | None:
    """One sentence for the user, or None. The HTTP process checks as well; the engine does not rely on it."""
    prompt, sampling = message.prompt_token_ids, message.sampling
    if not prompt:
        return "the prompt has no tokens, expected at least one"
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return f"the prompt holds a token id outside the model's vocabulary, expected 0 to {vocab_size - 1}"
    if message.lane not in LANES:
        return f"lane is {message.lane!r}, expected one of {', '.join(LANES)}"
    total = len(prompt) + sampling.max_tokens
    if total > max_request_tokens:
        return (
            f"{len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} make {total}, expected at most "
            f"{max_request_tokens}: shorten the prompt or lower max_tokens"
        )
    if any(not 0 <= token < vocab_size for token in sampling.logit_bias):
        return f"logit_bias names a token id outside the model's vocabulary, expected 0 to {vocab_size - 1}"
    return _why_unmaskable(sampling, vocab_size) or _why_unsampleable(sampling)


def _why_unmaskable(sampling: SamplingParams, vocab_size: int) -> str | None:
    masked = itertools.chain(sampling.allowed_token_ids, *sampling.bad_words)
    if any(not 0 <= token < vocab_size for token in masked) or not all(sampling.bad_words):
        return f"allowed_token_ids or bad_words hold no id of the model's vocabulary, expected 0 to {vocab_size - 1}"
    if sampling.grammar is not None and (sampling.allowed_token_ids or sampling.bad_words):
        return "allowed_token_ids and bad_words cannot be combined with a grammar: leave one out"
    return None


def _why_unsampleable(sampling: SamplingParams) -> str | None:
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}, expected at least 1"
    if not 0 <= sampling.temperature < float("inf"):
        return f"temperature is {sampling.temperature}, expected a number from 0 on"
    if not 0 <= sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}, expected 0 to 1"
    if sampling.top_k < 0:
        return f"top_k is {sampling.top_k}, expected 0 (off) or more"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}, expected 0 to 1"
    return _why_unadjustable(sampling)


def _why_unadjustable(sampling: SamplingParams) -> str | None:
    for name, value in (("presence", sampling.presence_penalty), ("frequency", sampling.frequency_penalty)):
        if not -2 <= value <= 2:
            return f"{name}_penalty is {value}, expected -2 to 2"
    if not 0.01 <= sampling.repetition_penalty <= 10:  # beyond, logits overflow
        return f"repetition_penalty is {sampling.repetition_penalty}, expected 0.01 to 10"
    if not all(-100 <= bias <= 100 for bias in sampling.logit_bias.values()):
        return "logit_bias adds more or less than 100 to a logit, expected -100 to 100"
    if sampling.min_tokens < 0 or (sampling.min_tokens > 0 and sampling.grammar is not None):
        return f"min_tokens is {sampling.min_tokens}, expected 0 or more, and 0 beside a grammar, which decides itself"
    if any(
        count is not None and not 0 <= count <= MAX_LOGPROBS for count in (sampling.logprobs, sampling.prompt_logprobs)
    ):
        return f"logprobs and prompt_logprobs count likely tokens, expected 0 to {MAX_LOGPROBS}"
    return None
