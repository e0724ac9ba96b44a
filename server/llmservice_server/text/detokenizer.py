"""Ids to text, token by token, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence

from llmservice_server.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT = 5  # tokens of the prompt that are decoded along: some decoders drop the first one's space
_MAX_WINDOW = 64  # past this many undecodable tokens they are noise, not a character that is still coming


class Detokenizer:
    """One sequence's text so far.

    A token may hold part of a character, so text that ends in U+FFFD is held back: a UTF-8 character lacks at most
    three bytes, hence at most three U+FFFD at the end can still turn into something.

    ```
    window:   |--- context, already sent ---|--- new ids ---|
    text:     |--------- _sent -------------|-- to send --|held|
    ```
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_token_ids[-_CONTEXT:])
        self._sent = len(tokenizer.decode(self._window).rstrip(_REPLACEMENT))

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these ids make certain; empty while a character is incomplete."""
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        text = self._tokenizer.decode(self._window)
        new = text[self._sent :]
        held = min(3, len(new) - len(new.rstrip(_REPLACEMENT)))
        if held and len(self._window) < _MAX_WINDOW:
            self._sent = max(self._sent, len(text) - held)
            return new[: len(new) - held]
        self._sent = len(text)
        self._forget(max(_CONTEXT, len(token_ids)))
        return new

    def flush(self) -> str:
        """What was held back, at the end of the sequence: the character stays incomplete for good."""
        text = self._tokenizer.decode(self._window)
        new, self._sent = text[self._sent :], len(text)
        return new

    def _forget(self, keep: int) -> None:
        """Drop all but the last ids, so that a step costs the same at the end of a long text as at its start."""
        if len(self._window) > 2 * keep:
            del self._window[:-keep]
            self._sent = len(self._tokenizer.decode(self._window))
