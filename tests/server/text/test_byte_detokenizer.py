"""The byte-level shortcut says what the library says, piece by piece."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from llmservice_server.text.byte_detokenizer import ByteDetokenizer
from llmservice_server.text.decoded_bytes import decoded_bytes
from llmservice_server.text.detokenizer import Detokenizer
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.tiny import tokenizer as tiny_tokenizer

LIBRARY = tiny_tokenizer.train(1024)
LIBRARY.add_tokens(["<tool>", "a tool"])  # text, one of them with a letter that stands for no byte
TOKENIZER = Tokenizer(LIBRARY)
BYTES = decoded_bytes(LIBRARY)


def _ids_of(text: str) -> list[int]:
    ids: list[int] = LIBRARY.encode(text, add_special_tokens=False).ids
    return ids


def _pieces(detokenizer: Detokenizer | ByteDetokenizer, ids: list[int], step: int = 1) -> list[str]:
    pieces = [detokenizer.append(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


@given(ids=st.lists(st.integers(0, 1026), max_size=60), step=st.integers(1, 4))
@settings(deadline=None)
def test_any_tokens_special_ones_and_half_characters_among_them_make_the_text_that_the_library_makes(
    ids: list[int], step: int
) -> None:
    assert BYTES is not None
    assert "".join(_pieces(ByteDetokenizer(BYTES, []), ids, step)) == TOKENIZER.decode(ids)


@given(text=st.text(alphabet="aé€日🎉👩‍👩‍👧", max_size=40), prompt=st.text(max_size=10))
@settings(deadline=None)
def test_each_piece_comes_as_early_as_the_library_would_let_it(text: str, prompt: str) -> None:
    assert BYTES is not None
    ids, before = _ids_of(text), _ids_of(prompt)
    assert _pieces(ByteDetokenizer(BYTES, before), ids) == _pieces(Detokenizer(TOKENIZER, before), ids)


def test_a_character_that_the_prompt_has_begun_is_shown_whole() -> None:
    assert BYTES is not None
    ids = _ids_of("🎉")
    assert len(ids) > 1
    assert "".join(_pieces(ByteDetokenizer(BYTES, ids[:1]), ids[1:])) == "🎉"


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.Sequence([decoders.ByteLevel()]), None])
def test_a_decoder_that_looks_at_neighbours_has_no_shortcut(decoder: decoders.Decoder | None) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        library.decoder = decoder
    assert decoded_bytes(library) is None
