"""The fewest tokens that a text can become, known from its length alone: what cannot fit need not be tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import tokenizers

from llmservice_server.sampling.token_bytes import byte_of_letter

_SHRINKS_BY = {"NFC": 3, "NFKC": 4, "NFD": 3, "NFKD": 4}
"""At most, in bytes: the Kelvin sign (3) is a K, a mathematical letter (4) is a letter."""
_KEEPS = {"Sequence", "ByteLevel", "Prepend", "Metaspace", "Digits", "Punctuation", "Split"}
"""Normalizers and pre-tokenizers that leave nothing out, with the behaviours that `_drops` looks at."""


def most_bytes_per_token(library: tokenizers.Tokenizer) -> int | None:
    """None where no such bound is certain: where text may be left out, or many unknown letters become one token."""
    vocab = library.get_vocab()
    model = library.model
    added = library.get_added_tokens_decoder()
    parts = [*_parts(library.normalizer), *_parts(library.pre_tokenizer)]
    byte_level = any(part["type"] == "ByteLevel" for part in parts)
    letters = byte_of_letter() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    if not isinstance(model, tokenizers.models.BPE) or not (byte_level or model.byte_fallback):
        return None
    if any(letter not in vocab for letter in letters) or any(map(_drops, parts)):
        return None
    if any(token.lstrip or token.rstrip for token in added.values()):  # they take the white space beside them along
        return None
    contents = {token.content for token in added.values()}
    pieces = (len(piece) if byte_level else len(piece.encode()) for piece in vocab if piece not in contents)
    longest = max([*pieces, *(len(content.encode()) for content in contents)], default=1)
    for part in parts:
        longest *= _SHRINKS_BY.get(part["type"], 1)
    return longest


def _parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of a normalizer or a pre-tokenizer, and of those that it is made of."""
    if component is None:
        return
    waiting = [msgspec.json.decode(component.__getstate__())]
    while waiting:
        settings = waiting.pop()
        yield settings
        waiting += settings.get("normalizers", []) + settings.get("pretokenizers", [])


def _drops(part: Mapping[str, Any]) -> bool:
    kind = part["type"]
    if kind == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is None or len(part["content"].encode()) < len(pattern.encode())
    return (kind not in _KEEPS and kind not in _SHRINKS_BY) or part.get("behavior") == "Removed"
