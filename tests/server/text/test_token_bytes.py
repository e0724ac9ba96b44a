"""The bytes of single tokens, for the two families of tokenizers."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from llmservice_server.text.token_bytes import TokenBytes
from llmservice_server.tiny import tokenizer as tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer.train(1024)


def _sentence_piece() -> tokenizers.Tokenizer:
    vocabulary = {"<s>": 0, "<0xE2>": 1, "<0x0A>": 2, "\u2581the": 3, "ma": 4, "\u00fc": 5}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(["<s>"])
    library.add_tokens(["<tool>"])
    return library


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_the_bytes_of_the_tokens_are_those_of_the_text(text: str) -> None:
    tokens = TokenBytes(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    if not any(name in text for name in tiny_tokenizer.SPECIAL_TOKENS):
        assert b"".join(tokens[token_id] for token_id in ids) == text.encode()


@pytest.mark.parametrize(
    ("token_id", "token_bytes", "text"),
    [
        (0, b"", "<s>"),
        (1, b"\xe2", "bytes:\\xe2"),
        (2, b"\n", "\n"),
        (3, b" the", " the"),
        (4, b"ma", "ma"),
        (5, "\u00fc".encode(), "\u00fc"),
        (6, b"<tool>", "<tool>"),
        (99, b"", ""),
    ],
)
def test_sentence_pieces_spaces_bytes_and_added_tokens_are_understood(
    token_id: int, token_bytes: bytes, text: str
) -> None:
    tokens = TokenBytes(_sentence_piece())
    assert (tokens[token_id], tokens.text(token_id)) == (token_bytes, text)
