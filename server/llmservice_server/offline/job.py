"""One prompt and its answers, on the way from the caller to the engine and back."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TypeGuard

from llmservice_server.api.sequence import Sequence
from llmservice_server.engine.admission import why_refused
from llmservice_server.messages import FinishReason, Generate, Output, Ready, TokenLogprobs
from llmservice_server.metrics import Metrics
from llmservice_server.offline.sampling_params import SamplingParams
from llmservice_server.text.stop_strings import StopStrings
from llmservice_server.text.tokenizer import Tokenizer

Prompt = str | Many[int]  # text, or token ids


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer, or what one step added to it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str | None = None  # why, where `finish_reason` is "error"
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, where asked for


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its `n` answers."""

    prompt: str | None  # None where token ids were given
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the second token and those after it, where asked for


class Job:
    """Raises ValueError where the engine could never serve the prompt, with the numbers."""

    def __init__(
        self, request_id: str, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer, ready: Ready
    ) -> None:
        arrival_s = time.monotonic()
        self._prompt = prompt if isinstance(prompt, str) else None
        self._token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.messages = [
            Generate(
                request_id=f"{request_id}-{choice}",
                prompt_token_ids=self._token_ids,
                sampling=params.for_engine(choice, tokenizer.eos_token_ids),
                arrival_s=arrival_s,
            )
            for choice in range(params.n)
        ]
        if problem := why_refused(self.messages[0], tokenizer.vocab_size, ready.max_request_tokens):
            raise ValueError(problem)
        self._sequences = {
            message.request_id: Sequence(
                request_id=message.request_id,
                index=choice,
                prompt_index=0,
                prompt_token_ids=self._token_ids,
                stops=StopStrings(params.stop_strings),
                tokenizer=tokenizer,
                arrival_s=arrival_s,
                min_tokens=params.min_tokens,
            )
            for choice, message in enumerate(self.messages)
        }
        self._texts = ["" for _ in self.messages]
        self._answers: list[list[int]] = [[] for _ in self.messages]
        self._errors: list[str | None] = [None for _ in self.messages]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in self.messages]

    def advance(self, output: Output, metrics: Metrics) -> CompletionOutput | None:
        """What a step added to one of the answers; None where a stop text had ended it before."""
        sequence = self._sequences[output.request_id]
        if _ended(sequence):
            return None
        text = sequence.advance(output, time.monotonic(), metrics)
        self._texts[sequence.index] += text
        self._answers[sequence.index] += output.token_ids
        self._errors[sequence.index] = output.error
        logprobs = sequence.take_logprobs()
        self._logprobs[sequence.index] += logprobs
        if _ended(sequence):
            sequence.close(metrics)
        return CompletionOutput(
            sequence.index, text, tuple(output.token_ids), sequence.finish_reason, output.error, tuple(logprobs)
        )

    def take_stopped(self) -> list[str]:
        """Ids of sequences that a stop text has ended and that the engine still computes: to be aborted, once."""
        stopped = [sequence for sequence in self._sequences.values() if sequence.stopped_by_string]
        for sequence in stopped:
            sequence.stopped_by_string = False
        return [sequence.request_id for sequence in stopped]

    def close(self, metrics: Metrics) -> list[str]:
        """Count what is unfinished as aborted; returns its ids."""
        unfinished = [sequence for sequence in self._sequences.values() if not _ended(sequence)]
        for sequence in unfinished:
            sequence.finish_reason = "abort"
            sequence.close(metrics)
        return [sequence.request_id for sequence in unfinished]

    @property
    def num_unfinished(self) -> int:
        return sum(not _ended(sequence) for sequence in self._sequences.values())

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._answers))

    @property
    def result(self) -> RequestOutput:
        outputs = tuple(
            CompletionOutput(sequence.index, text, tuple(ids), sequence.finish_reason, error, tuple(logprobs))
            for sequence, text, ids, error, logprobs in zip(
                self._sequences.values(), self._texts, self._answers, self._errors, self._logprobs, strict=True
            )
        )
        first = next(iter(self._sequences.values()))
        return RequestOutput(self._prompt, tuple(self._token_ids), outputs, tuple(first.prompt_logprobs))


def _ended(sequence: Sequence) -> bool:
    return sequence.finish_reason is not None


def as_prompts(prompts: Prompt | Many[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. An empty list holds no prompt."""
    if isinstance(prompts, str) or (prompts and _is_token_ids(prompts)):
        return [prompts]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]


def _is_token_ids(prompts: Many[int] | Many[Prompt]) -> TypeGuard[Many[int]]:
    ids = sum(isinstance(prompt, int) for prompt in prompts)
    if 0 < ids < len(prompts):
        raise ValueError("prompts mixes token ids with texts or lists: expected one kind")
    return ids > 0


def as_params(params: SamplingParams | Many[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """One set for every prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} sampling parameters for {num_prompts} prompts: expected one, or one for each")
    return list(params)
