"""The bytes that single tokens stand for; a token may hold part of a character."""

from __future__ import annotations

import re
from functools import cache

import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's spelling of a byte that it has no character for
_SPACE = "\u2581"  # SentencePiece's spelling of a space


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a vocabulary, either byte-level BPE (GPT-2) or SentencePiece, decoded at first use.

    Special tokens are no text: they have no bytes, nor have ids without a token.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        added = library.get_added_tokens_decoder()
        super().__init__({token_id: b"" for token_id, token in added.items() if token.special})
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._library = library
        self._byte_level = library.decoder is not None and b"ByteLevel" in library.decoder.__getstate__()
        self.concatenate = isinstance(library.decoder, tokenizers.decoders.ByteLevel)
        """Whether the bytes of tokens side by side are those of their text. Other decoders look at the neighbours."""

    def __missing__(self, token_id: int) -> bytes:
        piece = self._library.id_to_token(token_id) or ""
        if self._byte_level:
            spelled = [byte_of_letter().get(letter) for letter in piece]
            known = [byte for byte in spelled if byte is not None]
            self[token_id] = bytes(known) if len(known) == len(spelled) else piece.encode()
        elif token_id in self._added:
            self[token_id] = piece.encode()
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
