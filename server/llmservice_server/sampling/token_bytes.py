"""What single tokens spell: bytes, as a token may hold half a character."""

from __future__ import annotations

import re
from functools import cache

import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's spelling of a byte that it has no character for
_SPACE = "\u2581"  # SentencePiece's spelling of a space


class TokenBytes:
    """The bytes of each token of a vocabulary, be it byte-level BPE (GPT-2) or SentencePiece."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._added = library.get_added_tokens_decoder()
        self._byte_level = b"ByteLevel" in library.decoder.__getstate__() if library.decoder is not None else False

    def of(self, token_id: int) -> bytes | None:
        """None for a special token, which is no text, and for an id without a token."""
        added = self._added.get(token_id)
        if added is not None:
            return None if added.special else added.content.encode()
        piece = self._library.id_to_token(token_id)
        if piece is None:
            return None
        if self._byte_level:
            spelled = byte_of_letter()
            return b"".join(bytes([spelled[letter]]) if letter in spelled else letter.encode() for letter in piece)
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()

    def text(self, token_id: int) -> str:
        """For people to read: a special token's name, and the bytes themselves where they are no whole characters."""
        spelled = self.of(token_id)
        if spelled is None:
            return self._library.id_to_token(token_id) or ""
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


@cache
def byte_of_letter() -> dict[str, int]:
    """Byte-level BPE spells each byte as one letter: Latin-1's where that is printable, else from U+0100 on."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
