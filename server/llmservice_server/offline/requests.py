"""Prompts and parameters as callers give them, made into requests, and their results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import msgspec

from llmservice_server.engine.request import why_refused
from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.types.messages import GenerateRequest, Ready, SamplingParams, TokenLogprobs

Prompt = str | Sequence[int]  # text, or token ids


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its `n` answers."""

    prompt: str | None  # None where token ids were given
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the second token and those after it, where requested


def make_requests(
    request_id: str,
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer,
    ready: Ready,
) -> list[GenerateRequest]:
    """One for each prompt. Raises ValueError where the engine could never serve one, with the numbers."""
    arrival_s = time.monotonic()
    requests = []
    for index, (prompt, params) in enumerate(zip(prompts, _params_list(sampling_params, len(prompts)), strict=True)):
        token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        request = GenerateRequest(
            request_id=request_id, prompt_token_ids=token_ids, sampling=params, arrival_s=arrival_s
        )
        if problem := why_refused(request, tokenizer.vocab_size, ready.max_request_tokens):
            raise ValueError(f"prompt {index}: {problem}")
        requests.append(request)
    return requests


def request_outputs(
    prompts: Sequence[Prompt], processor: OutputProcessor, outputs: Iterable[CompletionOutput]
) -> list[RequestOutput]:
    """The results in the order of the prompts; `outputs` are the whole answers to all of them."""
    answers: list[list[CompletionOutput]] = [[] for _ in prompts]
    prompt_logprobs: list[tuple[TokenLogprobs, ...]] = [()] * len(prompts)
    for output in sorted(outputs, key=lambda output: output.index):
        state = processor.states[output.index]
        of_prompt = answers[state.prompt_index]
        prompt_logprobs[state.prompt_index] = prompt_logprobs[state.prompt_index] or state.prompt_logprobs
        of_prompt.append(msgspec.structs.replace(output, index=len(of_prompt)))
    token_ids = {state.prompt_index: tuple(state.request.prompt_token_ids) for state in processor.states}
    return [
        RequestOutput(prompt if isinstance(prompt, str) else None, token_ids[index], tuple(of_prompt), logprobs)
        for index, (prompt, of_prompt, logprobs) in enumerate(zip(prompts, answers, prompt_logprobs, strict=True))
    ]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. An empty list holds no prompt."""
    if isinstance(prompts, str) or (prompts and _is_token_ids(prompts)):
        return [prompts]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]


def _is_token_ids(prompts: Sequence[int] | Sequence[Prompt]) -> TypeGuard[Sequence[int]]:
    ids = sum(isinstance(prompt, int) for prompt in prompts)
    if 0 < ids < len(prompts):
        raise ValueError("prompts mixes token ids with texts or lists: expected one kind")
    return ids > 0


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """One for each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} sampling parameters for {num_prompts} prompts: expected one, or one for each")
    return list(params)
