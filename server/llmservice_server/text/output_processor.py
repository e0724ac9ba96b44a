"""From the engine's outputs to answers: text, stop strings, log-probabilities, and the counts and times of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from llmservice_server.text.detokenizer import StopStrings
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.types.messages import FinishReason, GenerateRequest, Output, TokenLogprobs


class CompletionOutput(msgspec.Struct, frozen=True, gc=False):
    """One answer, or a piece of it."""

    index: int  # among the answers to the request
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, where requested
    error: str | None = None  # where `finish_reason` is "error"
    error_status: int = 500  # HTTP status for `error`


class Recorder(Protocol):
    """Receives the counts and times of answers, for metrics."""

    def record_first_tokens(self, state: RequestState, num_tokens: int) -> None:
        """The first step with tokens of an answer has produced `num_tokens`."""

    def record_tokens(self, num_tokens: int, since_last_s: float) -> None:
        """A later step has produced `num_tokens`, `since_last_s` after the one before."""

    def record_finished(self, state: RequestState) -> None:
        """An answer has ended, for `state.finish_reason`."""


class RequestState:
    """One answer while the engine computes it. Times are monotonic seconds."""

    def __init__(
        self,
        prompt: GenerateRequest,
        prompt_index: int,
        choice: int,
        index: int,
        tokenizer: Tokenizer,
        recorder: Recorder,
        *,
        final_only: bool,
        kept: Mapping[int, str],
    ) -> None:
        params = prompt.sampling
        self.request = msgspec.structs.replace(
            prompt,
            request_id=f"{prompt.request_id}-{index}",
            sampling=params.for_engine(choice, tokenizer.eos_token_ids),
            end_token_ids=() if params.grammar is None else tuple(sorted(tokenizer.eos_token_ids)),
        )
        self.index = index
        self.prompt_index = prompt_index
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.queue_s = 0.0
        self.first_token_s: float | None = None
        self.last_token_s = prompt.arrival_s
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._min_tokens = params.min_tokens
        self._scores_prompt = params.max_tokens == 0
        self._detokenizer = tokenizer.detokenizer(
            prompt.prompt_token_ids, skip_special_tokens=params.skip_special_tokens, kept=kept
        )
        self._stops = StopStrings(params.stop_strings, keep=params.include_stop_str_in_output)
        self._recorder = recorder
        self._final_only = final_only
        self._held_text: list[str] = []
        self._held_token_ids: list[int] = []
        self._held_logprobs: list[TokenLogprobs] = []

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    def process(self, output: Output, now: float) -> CompletionOutput | None:
        """The next piece of the answer, None while there is none. Sets `finish_reason` with the last one."""
        if self._scores_prompt and output.finish_reason in ("stop", "length"):
            output = msgspec.structs.replace(output, token_ids=[], logprobs=(), finish_reason="length")
        if output.token_ids:
            self._record(output, now)
        elif self.first_token_s is None:
            self.last_token_s = now  # it ends without a token
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        text = self._detokenizer.append(output.token_ids)
        if output.finish_reason is not None:
            text += self._detokenizer.flush()
        if self.num_tokens > self._min_tokens or not self._min_tokens:
            text = self._stops.append(text)
        if self._stops.matched is not None:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            text += self._stops.flush()
            self.finish_reason = output.finish_reason
        return self._piece(text, output)

    def _piece(self, text: str, output: Output) -> CompletionOutput | None:
        token_ids, logprobs = tuple(output.token_ids), output.logprobs
        if self.finish_reason is None and (self._final_only or not text):
            self._held_text.append(text)
            self._held_token_ids += token_ids
            self._held_logprobs += logprobs
            return None
        if self._held_text:
            text = "".join([*self._held_text, text])
            token_ids = (*self._held_token_ids, *token_ids)
            logprobs = (*self._held_logprobs, *logprobs)
            self._held_text, self._held_token_ids, self._held_logprobs = [], [], []
        return CompletionOutput(
            self.index, text, token_ids, self.finish_reason, logprobs, output.error, output.error_status
        )

    def _record(self, output: Output, now: float) -> None:
        num_tokens = len(output.token_ids)
        self.num_tokens += num_tokens
        if self.first_token_s is None:
            self.first_token_s = now
            self.queue_s = output.queue_s or 0.0
            self.num_cached_tokens = output.num_cached_tokens
            self._recorder.record_first_tokens(self, num_tokens)
        else:
            self._recorder.record_tokens(num_tokens, now - self.last_token_s)
        self.last_token_s = now


class OutputProcessor:
    """The answers to one request: `sampling.n` for each of its prompts, in the order of the prompts.

    Usage: send `requests` to the engine, `process` what it returns, abort what `take_stopped` names; in the end
    abort what `close` names.
    """

    def __init__(
        self,
        prompts: Sequence[GenerateRequest],
        tokenizer: Tokenizer,
        recorder: Recorder,
        *,
        final_only: bool = False,
        kept: Mapping[int, str] | None = None,
    ) -> None:
        """`prompts`: one request for each prompt, all with one id. `final_only`: return whole answers, not pieces.

        `kept`: special tokens that are part of the text.
        """
        choices = [(number, choice) for number, prompt in enumerate(prompts) for choice in range(prompt.sampling.n)]
        self._prompts = prompts
        self.tokenizer = tokenizer
        self.states = [
            RequestState(
                prompts[number], number, choice, index, tokenizer, recorder, final_only=final_only, kept=kept or {}
            )
            for index, (number, choice) in enumerate(choices)
        ]
        self.num_unfinished = len(self.states)
        self._recorder = recorder
        self._states_by_id = {state.request.request_id: state for state in self.states}
        self._stopped: list[str] = []

    @property
    def request_id(self) -> str:
        return self._prompts[0].request_id

    @property
    def requests(self) -> list[GenerateRequest]:
        """What to send to the engine."""
        return [state.request for state in self.states]

    def process(self, outputs: Sequence[Output], now: float) -> list[CompletionOutput]:
        """The pieces of text that became certain, with the tokens since the piece before.

        Outputs of answers that have ended, and of other requests, are ignored.
        """
        pieces = []
        for output in outputs:
            state = self._states_by_id.get(output.request_id)
            if state is None or state.finish_reason is not None:
                continue
            piece = state.process(output, now)
            if piece is None:
                continue
            pieces.append(piece)
            if piece.finish_reason is not None:
                self.num_unfinished -= 1
                self._recorder.record_finished(state)
                if output.finish_reason is None:
                    self._stopped.append(output.request_id)
        return pieces

    def take_stopped(self) -> list[str]:
        """Ids of answers that a stop string ended since the last call: the engine still computes them."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def close(self, reason: FinishReason = "abort") -> list[str]:
        """End the unfinished answers with `reason`. Returns their ids."""
        unfinished = [state for state in self.states if state.finish_reason is None]
        for state in unfinished:
            state.finish_reason = reason
            self._recorder.record_finished(state)
        self.num_unfinished = 0
        return [state.request.request_id for state in unfinished]

    @property
    def num_prompt_tokens(self) -> int:
        """A prompt counts once, however many answers it has."""
        return sum(state.num_prompt_tokens for state in self._last_of_each_prompt)

    @property
    def num_cached_tokens(self) -> int:
        """Those of `num_prompt_tokens` that were in the prefix cache."""
        return sum(state.num_cached_tokens for state in self._last_of_each_prompt)

    @property
    def num_tokens(self) -> int:
        """Generated tokens, of all answers."""
        return sum(state.num_tokens for state in self.states)

    @property
    def ttft_s(self) -> float | None:
        """Of the answer that began first; None before its first token."""
        return min((state.ttft_s for state in self.states if state.ttft_s is not None), default=None)

    @property
    def _last_of_each_prompt(self) -> list[RequestState]:
        return list({state.prompt_index: state for state in self.states}.values())
