"""The choices of /v1/completions, with their log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import ClassVar

from llmservice_server.http.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from llmservice_server.http.response import Choice, prompt_logprobs, usage
from llmservice_server.text.detokenizer import TokenBytes
from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor, RequestState
from llmservice_server.types.messages import TokenLogprobs


class TextDelta(Choice):
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None


class CompletionFormat:
    """The first piece of a choice begins with the prompt where `echo` is set."""

    id_prefix: ClassVar[str] = "cmpl"
    chunk: ClassVar[str] = "text_completion"
    num_reasoning_tokens: ClassVar[None] = None

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

    def answer(self, identity: str, created: int, model: str, outputs: Sequence[CompletionOutput]) -> Completion:
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return Completion(id=identity, created=created, model=model, choices=choices, usage=usage(self._processor))

    def delta(self, output: CompletionOutput) -> Sequence[Choice]:
        text, logprobs = self._text(output)
        return [TextDelta(output.index, text, output.finish_reason, logprobs)]

    def _choice(self, index: int, output: CompletionOutput) -> CompletionChoice:
        text, logprobs = self._text(output)
        choice = CompletionChoice(index=index, text=text, finish_reason=output.finish_reason, logprobs=logprobs)
        if self._with_prompt_logprobs:
            entries = self._processor.states[output.index].prompt_logprobs
            choice.prompt_logprobs = prompt_logprobs(entries, self._processor.tokenizer.token_bytes)
        return choice

    def _text(self, output: CompletionOutput) -> tuple[str, CompletionLogprobs | None]:
        text, state = output.text, self._processor.states[output.index]
        echoed = state if self._echo and output.index not in self._echoed else None
        if echoed is not None:
            self._echoed.add(output.index)
            prompt = self._prompts[echoed.prompt_index]
            text = (prompt if isinstance(prompt, str) else self._processor.tokenizer.decode(prompt)) + text
        return text, self._logprobs(output, echoed) if self._with_logprobs else None

    def _logprobs(self, output: CompletionOutput, echoed: RequestState | None) -> CompletionLogprobs:
        writer = self._writers.get(output.index)
        if writer is None:
            tokens = self._processor.tokenizer.token_bytes
            writer = CompletionLogprobsWriter(tokens, strips_space=echoed is not None and tokens.strips_space)
            self._writers[output.index] = writer
        written = CompletionLogprobs()
        if echoed is not None:
            writer.write_first(written, echoed.request.prompt_token_ids[0])
            writer.write(written, echoed.prompt_logprobs)
        writer.write(written, output.logprobs)
        return written


class CompletionLogprobsWriter:
    """Writes one choice's lists piece by piece, counting the characters of the text before."""

    def __init__(self, tokens: TokenBytes, *, strips_space: bool = False) -> None:
        """`strips_space`: the text has no space of its first token, as Llama 2's of a prompt."""
        self._tokens = tokens
        self._strips_space = strips_space
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
        text = self._decoder.decode(self._tokens[token_id])
        if self._strips_space and text:
            text, self._strips_space = text.removeprefix(" "), False
        self._offset += len(text)
