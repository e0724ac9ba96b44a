"""Log-probabilities in the two shapes that OpenAI has for them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Many

import msgspec

from llmservice_server.messages import TokenLogprobs
from llmservice_server.sampling.token_bytes import TokenBytes


class CompletionLogprobs(msgspec.Struct):
    """/v1/completions: parallel lists. `text_offset` counts characters from the start of the choice's text."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """/v1/chat/completions: one object per token."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobsWriter:
    """One choice's lists, piece by piece; it knows how far into the text it is."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, first_token_id: int, entries: Many[TokenLogprobs]) -> CompletionLogprobs:
        """The first token of a prompt has nothing before it that could make it likely."""
        written = CompletionLogprobs()
        self._write(written, first_token_id, None, None)
        return self.extend(written, entries)

    def extend(self, written: CompletionLogprobs, entries: Many[TokenLogprobs]) -> CompletionLogprobs:
        """`written`, with what follows it."""
        for entry in entries:
            top = [*entry.top, (entry.token_id, entry.logprob)]  # the token itself is told, however unlikely
            likeliest: dict[str, float] = {}
            for token_id, logprob in top:
                likeliest.setdefault(self._tokens.text(token_id), logprob)
            self._write(written, entry.token_id, entry.logprob, likeliest)
        return written

    def _write(
        self, written: CompletionLogprobs, token_id: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        written.tokens.append(self._tokens.text(token_id))
        written.token_logprobs.append(logprob)
        written.top_logprobs.append(top)
        written.text_offset.append(self._offset)
        self._offset += len(self._decoder.decode(self._tokens.of(token_id) or b""))


def chat_logprobs(entries: Many[TokenLogprobs], tokens: TokenBytes) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ContentLogprob(
                tokens.text(entry.token_id),
                entry.logprob,
                _bytes(entry.token_id, tokens),
                [TopLogprob(tokens.text(top), logprob, _bytes(top, tokens)) for top, logprob in entry.top],
            )
            for entry in entries
        ]
    )


def _bytes(token_id: int, tokens: TokenBytes) -> list[int] | None:
    spelled = tokens.of(token_id)
    return None if spelled is None else list(spelled)
