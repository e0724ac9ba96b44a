"""The choices of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import ClassVar

from llmservice_server.api.generation import Progress
from llmservice_server.api.logprobs import CompletionLogprobs, CompletionLogprobsWriter
from llmservice_server.api.request import CompletionRequest
from llmservice_server.api.response import Choice
from llmservice_server.api.sequence import Sequence
from llmservice_server.text.tokenizer import Tokenizer


class Text(Choice):
    """A completion's choice, whole or in part."""

    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None


class CompletionFormat:
    """Whole choices and parts look alike; the first part of a choice carries the prompt where it is to be echoed."""

    id_prefix: ClassVar[str] = "cmpl"
    whole: ClassVar[str] = "text_completion"
    chunk: ClassVar[str] = "text_completion"

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._echo = request.echo
        self._prompts = request.prompts
        self._with_logprobs = request.logprobs is not None
        self._echoed = set[int]()  # choices that have begun with their prompt
        self._writers: dict[int, CompletionLogprobsWriter] = {}  # by choice, once it has begun

    def opening(self, index: int) -> Many[Choice]:
        return []

    def choice(self, progress: Progress) -> Text:
        sequence = progress.sequence
        text = progress.text
        if self._echo and sequence.index not in self._echoed:
            self._echoed.add(sequence.index)
            text = self._prompt(sequence) + text
        return Text(sequence.index, text, progress.finish_reason, self._logprobs(sequence))

    def delta(self, progress: Progress) -> Many[Choice]:
        return [self.choice(progress)]

    def _prompt(self, sequence: Sequence) -> str:
        prompt = self._prompts[sequence.prompt_index]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _logprobs(self, sequence: Sequence) -> CompletionLogprobs | None:
        if not self._with_logprobs:
            return None
        begun = sequence.index in self._writers
        writer = self._writers.setdefault(sequence.index, CompletionLogprobsWriter(self._tokenizer.token_bytes))
        written = CompletionLogprobs()
        if self._echo and not begun:
            written = writer.prompt(sequence.prompt_token_ids[0], sequence.prompt_logprobs)
        return writer.extend(written, sequence.take_logprobs())
