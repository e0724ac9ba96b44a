"""Text that arrives token by token: the bytes of a token, incremental detokenization, and stop strings."""

from __future__ import annotations

import codecs
import json
import re
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's spelling of a byte that it has no character for
_SPACE = "\u2581"  # SentencePiece's spelling of a space
_REPLACEMENT = "\ufffd"
_PROMPT_CONTEXT = 5  # prompt tokens decoded along: a character may begin there, and some decoders drop a first space
_SENTENCE_PIECE = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
"""The decoder of Llama 2, Mistral and Gemma. Of successive bytes of which the last are no whole character, the library
makes U+FFFD of all."""
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_MAX_WINDOW = 64  # more undecodable tokens than this are not a character that is still incomplete


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a vocabulary, either byte-level BPE (GPT-2) or SentencePiece, decoded at first use.

    Special tokens are no text: they have no bytes, nor have ids without a token.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        added = library.get_added_tokens_decoder()
        super().__init__({token_id: b"" for token_id, token in added.items() if token.special})
        self._library = library
        decoder = {} if library.decoder is None else json.loads(library.decoder.__getstate__())
        self._byte_level = "ByteLevel" in json.dumps(decoder)
        *rest, last = decoder.get("decoders", [decoder])
        self.strips_space = last == _STRIP
        """Whether a text loses a space at its beginning."""
        is_sentence_piece = (rest if self.strips_space else [*rest, last]) == _SENTENCE_PIECE
        self.concatenate = is_sentence_piece or decoder.get("type") == "ByteLevel"
        """Whether the bytes of tokens side by side are those of their text. Other decoders look at the neighbours."""

    def __missing__(self, token_id: int) -> bytes:
        piece = self._library.id_to_token(token_id) or ""
        if self._byte_level:
            spelled = [byte_of_letter().get(letter) for letter in piece]
            known = [byte for byte in spelled if byte is not None]
            self[token_id] = bytes(known) if len(known) == len(spelled) else piece.encode()
        elif byte := _BYTE_PIECE.fullmatch(piece):
            self[token_id] = bytes([int(byte[1], 16)])
        else:
            self[token_id] = piece.replace(_SPACE, " ").encode()
        return self[token_id]

    def text(self, token_id: int) -> str:
        """For people to read: a special token's name, and the bytes themselves where they are no whole characters."""
        token_bytes = self[token_id]
        if not token_bytes:
            return self._library.id_to_token(token_id) or ""
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


@cache
def byte_of_letter() -> dict[str, int]:
    """Byte-level BPE spells each byte as one letter: Latin-1's where that is printable, else from U+0100 on."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


class ByteDetokenizer:
    """Looks the bytes of each token up, where `TokenBytes.concatenate`. An incomplete character is held back."""

    def __init__(
        self, token_bytes: TokenBytes, prompt_token_ids: Sequence[int], kept: Mapping[int, str] | None = None
    ) -> None:
        """`kept`: special tokens that are part of the text."""
        self._bytes_of: Callable[[int], bytes] = token_bytes.__getitem__
        if kept:
            self._bytes_of = ChainMap({i: text.encode() for i, text in kept.items()}, token_bytes).__getitem__
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = False
        self._strips_space = not self.append(prompt_token_ids[-_PROMPT_CONTEXT:]) and token_bytes.strips_space

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; empty while a character is incomplete."""
        text = self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))
        if self._strips_space and text:
            text, self._strips_space = text.removeprefix(" "), False
        return text

    def flush(self) -> str:
        """The text held back, at the end of the answer: its last character remains incomplete."""
        return self._decoder.decode(b"", final=True)


class Detokenizer:
    """Decodes a window of the last ids, for decoders whose output depends on neighbouring tokens.

    A token may hold part of a character, so U+FFFD at the end of the text is held back. A window begins with a whole
    character: of successive bytes that begin or end within one, some decoders make U+FFFD of all.

    ```
    window:   |--- context, already sent ---|--- new ids ---|
    text:     |--------- _sent -------------|-- to send --|held|
    ```
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = self._last(prompt_token_ids, _PROMPT_CONTEXT)
        self._sent = len(decode(self._window).rstrip(_REPLACEMENT))

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; empty while a character is incomplete."""
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        new = text[self._sent :]
        held = len(new) - len(new.rstrip(_REPLACEMENT))
        if held and len(self._window) < _MAX_WINDOW:
            self._sent = max(self._sent, len(text) - held)
            return new[: len(new) - held]
        self._sent = len(text)
        self._shorten_window(max(_PROMPT_CONTEXT, len(token_ids)))
        return new

    def flush(self) -> str:
        """The text held back, at the end of the answer: its last character remains incomplete."""
        text = self._decode(self._window)
        new, self._sent = text[self._sent :], len(text)
        return new

    def _shorten_window(self, keep: int) -> None:
        """Drop all but the last ids, so that a step costs the same at the end of a long text as at its start."""
        if len(self._window) > 2 * keep:
            self._window = self._last(self._window, keep)
            self._sent = len(self._decode(self._window))

    def _last(self, ids: Sequence[int], keep: int) -> list[int]:
        """The last ids, some more where the first character would not be whole."""
        most = min(len(ids), keep + _MAX_WINDOW)
        while keep < most and self._decode(list(ids[-keep:])).startswith(_REPLACEMENT):
            keep += 1
        return list(ids[-keep:])


class StopStrings:
    """Passes text on once it cannot be part of a stop string, and ends at the one that is complete first.

    Which one that is does not depend on the pieces: a step may yield several tokens.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """`keep`: the stop string that appears is passed on as well."""
        self._keep = keep
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        self.rest = ""  # the text after the match

    def append(self, text: str) -> str:
        """The text that can be passed on; empty after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(index + len(stop), index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            _, index, self.matched = min(found)
            self._held = ""
            self.rest = text[index + len(self.matched) :]
            return text[: index + len(self.matched)] if self._keep else text[:index]
        safe = len(text) - self._longest_partial_match(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """The text held back, once the answer has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _longest_partial_match(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
