"""Ids to text for byte-level tokenizers: what a token spells does not depend on its neighbours."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_CONTEXT = 5  # tokens of the prompt, in which a character may have begun


class ByteDetokenizer:
    """One sequence's text so far, without asking the library anew for what it has decoded before.

    Does what `Detokenizer` does: bytes are held back while they may still become a character.
    """

    def __init__(self, decoded_bytes: Callable[[int], bytes], prompt_token_ids: Sequence[int]) -> None:
        self._bytes_of = decoded_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.append(prompt_token_ids[-_CONTEXT:])

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these ids make certain; empty while a character is incomplete."""
        if len(token_ids) == 1:
            return self._decoder.decode(self._bytes_of(token_ids[0]))
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """What was held back, at the end of the sequence: the character stays incomplete for good."""
        return self._decoder.decode(b"", final=True)
