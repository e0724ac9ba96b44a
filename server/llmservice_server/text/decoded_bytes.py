"""What a byte-level tokenizer's decoder makes of each token, looked up in the library once a token."""

from __future__ import annotations

from collections.abc import Callable

import tokenizers

from llmservice_server.sampling.token_bytes import byte_of_letter


def decoded_bytes(library: tokenizers.Tokenizer) -> Callable[[int], bytes] | None:
    """None where a token's text depends on those beside it, as with every decoder that is not byte-level alone."""
    return _DecodedBytes(library).__getitem__ if isinstance(library.decoder, tokenizers.decoders.ByteLevel) else None


class _DecodedBytes(dict[int, bytes]):
    """Special tokens are no text."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        super().__init__({i: b"" for i, token in library.get_added_tokens_decoder().items() if token.special})
        self._library = library

    def __missing__(self, token_id: int) -> bytes:
        piece = self._library.id_to_token(token_id) or ""
        spelled = [byte_of_letter().get(letter) for letter in piece]
        known = [byte for byte in spelled if byte is not None]
        self[token_id] = bytes(known) if len(known) == len(spelled) else piece.encode()
        return self[token_id]
