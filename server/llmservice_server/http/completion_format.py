"""The choices of /v1/completions, with their log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from llmservice_server.http.protocol.completions import CompletionRequest
from llmservice_server.http.response import Choice, PromptLogprobs, prompt_logprobs
from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor, RequestState
from llmservice_server.text.token_bytes import TokenBytes
from llmservice_server.types.messages import TokenLogprobs


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists. `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class Text(Choice):
    """A completion's choice, whole or a piece."""

    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionFormat:
    """Whole choices and pieces have the same shape; the first piece begins with the prompt where `echo` is set."""

    id_prefix: ClassVar[str] = "cmpl"
    whole: ClassVar[str] = "text_completion"
    chunk: ClassVar[str] = "text_completion"

    def __init__(self, request: CompletionRequest, processor: OutputProcessor) -> None:
        self._processor = processor
        self._echo = request.echo
        self._prompts = request.prompts
        self._with_logprobs = request.logprobs is not None
        self._with_prompt_logprobs = request.prompt_logprobs is not None
        self._echoed = set[int]()  # choices that have begun with their prompt
        self._writers: dict[int, CompletionLogprobsWriter] = {}  # by choice

    def opening(self, index: int) -> Sequence[Choice]:
        return []

    def choice(self, output: CompletionOutput) -> Text:
        text, logprobs = output.text, None
        state = self._processor.states[output.index]
        echoed = state if self._echo and output.index not in self._echoed else None
        if echoed is not None:
            self._echoed.add(output.index)
            prompt = self._prompts[echoed.prompt_index]
            text = (prompt if isinstance(prompt, str) else self._processor.tokenizer.decode(prompt)) + text
        if self._with_logprobs:
            logprobs = self._logprobs(output, echoed)
        choice = Text(output.index, text, output.finish_reason, logprobs)
        if self._with_prompt_logprobs:
            choice.prompt_logprobs = prompt_logprobs(state.prompt_logprobs, self._processor.tokenizer.token_bytes)
        return choice

    def delta(self, output: CompletionOutput) -> Sequence[Choice]:
        return [self.choice(output)]

    def _logprobs(self, output: CompletionOutput, echoed: RequestState | None) -> CompletionLogprobs:
        writer = self._writers.get(output.index)
        if writer is None:
            writer = self._writers[output.index] = CompletionLogprobsWriter(self._processor.tokenizer.token_bytes)
        written = CompletionLogprobs()
        if echoed is not None:
            writer.write_first(written, echoed.request.prompt_token_ids[0])
            writer.write(written, echoed.prompt_logprobs)
        writer.write(written, output.logprobs)
        return written


class CompletionLogprobsWriter:
    """Writes one choice's lists piece by piece, counting the characters of the text before."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write_first(self, written: CompletionLogprobs, token_id: int) -> None:
        """The first token of a prompt has no probability: there is no context before it."""
        self._append(written, token_id, None, None)

    def write(self, written: CompletionLogprobs, entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            top: dict[str, float] = {}
            for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):  # the token itself is always there
                top.setdefault(self._tokens.text(token_id), logprob)
            self._append(written, entry.token_id, entry.logprob, top)

    def _append(
        self, written: CompletionLogprobs, token_id: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        written.tokens.append(self._tokens.text(token_id))
        written.token_logprobs.append(logprob)
        written.top_logprobs.append(top)
        written.text_offset.append(self._offset)
        self._offset += len(self._decoder.decode(self._tokens[token_id]))
