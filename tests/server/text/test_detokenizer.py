"""Text that grows token by token is the text that decoding it at once gives, and never shows half a character."""

from __future__ import annotations

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from llmservice_server.sampling.token_bytes import byte_of_letter
from llmservice_server.text.detokenizer import Detokenizer
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.tiny import tokenizer as tiny_tokenizer

LIBRARY = tiny_tokenizer.train(1024)
BYTE_LEVEL = Tokenizer(LIBRARY)


def _ids_of(text: str) -> list[int]:
    ids: list[int] = LIBRARY.encode(text, add_special_tokens=False).ids
    return ids


def _bytes_of(data: bytes) -> list[int]:
    """One token for each byte: the hardest way to get a text."""
    letters = {byte: letter for letter, byte in byte_of_letter().items()}
    return [LIBRARY.token_to_id(letters[byte]) for byte in data]


def _pieces(detokenizer: Detokenizer, ids: list[int], step: int = 1) -> list[str]:
    pieces = [detokenizer.append(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


@given(text=st.text(max_size=80), prompt=st.text(max_size=10), step=st.integers(1, 4))
@settings(deadline=None)
def test_the_pieces_make_the_whole_text(text: str, prompt: str, step: int) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, _ids_of(prompt))
    assert "".join(_pieces(detokenizer, _ids_of(text), step)) == text


@given(text=st.text(alphabet="aé€日🎉👩‍👩‍👧", max_size=40))
@settings(deadline=None)
def test_no_piece_holds_half_a_character_though_each_token_is_one_byte(text: str) -> None:
    pieces = _pieces(Detokenizer(BYTE_LEVEL, []), _bytes_of(text.encode()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.binary(max_size=150))
@settings(deadline=None)
def test_bytes_that_are_no_text_come_out_as_decoding_them_at_once_would_show_them(data: bytes) -> None:
    pieces = _pieces(Detokenizer(BYTE_LEVEL, []), _bytes_of(data))
    assert "".join(pieces) == data.decode("utf-8", errors="replace")


def test_a_character_appears_with_its_last_byte() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    assert [detokenizer.append([token]) for token in _bytes_of("x🎉y".encode())] == ["x", "", "", "", "🎉", "y"]


def test_a_character_that_never_ends_is_shown_at_the_end() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    assert detokenizer.append(_bytes_of("né".encode()[:-1])) == "n"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_are_not_shown() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    end = LIBRARY.token_to_id(tiny_tokenizer.EOS)
    assert "".join(_pieces(detokenizer, [*_ids_of("one"), end, *_ids_of(" two")])) == "one two"


def test_the_first_word_keeps_its_space_where_the_decoder_strips_it_from_the_start() -> None:
    """SentencePiece's decoders drop the first space of what they decode: right for a text, wrong for its middle."""
    library = tokenizers.Tokenizer(models.WordLevel({"▁Hello": 0, "▁there": 1, "▁you": 2}, unk_token="▁you"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    detokenizer = Detokenizer(Tokenizer(library), [0])
    assert detokenizer.append([1]) == " there"
    assert detokenizer.append([2]) == " you"


def test_a_long_text_costs_no_more_per_token_than_a_short_one() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    for token in _ids_of("one two three four five six seven eight nine ten " * 20):
        detokenizer.append([token])
    assert len(detokenizer._window) <= 10
