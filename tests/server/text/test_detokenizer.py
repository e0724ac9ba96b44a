"""Detokenization token by token, and stop strings across the borders of pieces."""

from __future__ import annotations

from itertools import chain

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from llmservice_server.text.detokenizer import ByteDetokenizer, Detokenizer, StopStrings, TokenBytes
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.tiny import tokenizer as tiny_tokenizer

LIBRARY = tiny_tokenizer.train(1024)
LIBRARY.add_tokens(["<tool>", "a tool"])  # text, the second with a letter that stands for no byte
TOKENIZER = Tokenizer(LIBRARY)
BYTES = TOKENIZER.token_bytes


def _ids_of(text: str) -> list[int]:
    ids: list[int] = LIBRARY.encode(text, add_special_tokens=False).ids
    return ids


def _pieces(detokenizer: Detokenizer | ByteDetokenizer, ids: list[int], step: int = 1) -> list[str]:
    pieces = [detokenizer.append(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


@given(ids=st.lists(st.integers(0, 1026), max_size=60), step=st.integers(1, 4))
@settings(deadline=None)
def test_special_tokens_and_incomplete_characters_give_the_text_of_the_library(ids: list[int], step: int) -> None:
    assert "".join(_pieces(ByteDetokenizer(BYTES, []), ids, step)) == TOKENIZER.decode(ids)


@given(text=st.text(alphabet="aé€日🎉👩‍👩‍👧", max_size=40), prompt=st.text(max_size=10))
@settings(deadline=None)
def test_both_detokenizers_return_each_piece_at_the_same_token(text: str, prompt: str) -> None:
    ids, before = _ids_of(text), _ids_of(prompt)
    assert _pieces(ByteDetokenizer(BYTES, before), ids) == _pieces(Detokenizer(TOKENIZER.decode, before), ids)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("strips", [True, False])
@given(
    pieces=st.lists(st.sampled_from([*"a你😀é", " the"]), max_size=12),
    num_prompt=st.integers(0, 6),
    step=st.integers(1, 3),
)
@settings(deadline=None)
def test_successive_characters_of_bytes_are_those_of_the_library(
    strips: bool, skip_special_tokens: bool, pieces: list[str], num_prompt: int, step: int
) -> None:
    """As in Llama 2, Mistral and Gemma, whose vocabularies lack most characters."""
    library = _bytes_and_pieces(strips=strips)
    spelled = [_spelled(library, piece) for piece in pieces]
    prompt, ids = (list(chain(*part)) for part in (spelled[:num_prompt], spelled[num_prompt:]))
    tokenizer = Tokenizer(library)
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip_special_tokens)
    before = tokenizer.decode(prompt)
    assert before + "".join(_pieces(detokenizer, ids, step)) == tokenizer.decode(prompt + ids)


def test_a_character_that_begins_in_the_prompt_is_returned_whole() -> None:
    ids = _ids_of("🎉")
    assert len(ids) > 1
    assert "".join(_pieces(ByteDetokenizer(BYTES, ids[:1]), ids[1:])) == "🎉"


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.Sequence([decoders.ByteLevel()]), None])
def test_a_decoder_that_looks_at_neighbours_needs_the_library(decoder: decoders.Decoder | None) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        library.decoder = decoder
    assert isinstance(Tokenizer(library).detokenizer([]), Detokenizer)


def _bytes_and_pieces(*, strips: bool) -> tokenizers.Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581the": 256, "a": 257}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    return library


def _spelled(library: tokenizers.Tokenizer, piece: str) -> list[int]:
    token_id = library.token_to_id(piece.replace(" ", "\u2581"))
    return [*piece.encode()] if token_id is None else [token_id]


def _run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops)
    returned = []
    for piece in pieces:
        returned.append(matcher.append(piece))
        if matcher.matched is not None:
            return returned, matcher.matched
    return [*returned, matcher.flush()], None


@pytest.mark.parametrize(
    ("stops", "pieces", "returned", "matched"),
    [
        ([], ["one", " two"], ["one", " two", ""], None),
        (["STOP"], ["one STOP two"], ["one "], "STOP"),
        (["STOP"], ["one S", "TO", "P two"], ["one ", "", ""], "STOP"),
        (["STOP"], ["one S", "TO", "RM"], ["one ", "", "STORM", ""], None),
        (["STOP"], ["one ST"], ["one ", "ST"], None),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        (["two", "one"], ["one two"], [""], "one"),
        (["\n\n", "END"], ["a\n", "b\n", "\n", "c"], ["a", "\nb", ""], "\n\n"),
        (["abcd", "bc"], ["abc"], ["a"], "bc"),
        (["abcd", "bc"], ["abcd"], ["a"], "bc"),
        (["a"], ["a"], [""], "a"),
    ],
)
def test_text_is_returned_as_soon_as_it_can_no_longer_be_part_of_a_stop_string(
    stops: list[str], pieces: list[str], returned: list[str], matched: str | None
) -> None:
    assert _run(stops, pieces) == (returned, matched)


def test_a_stop_string_that_is_kept_is_the_last_text() -> None:
    matcher = StopStrings(["STOP", "x"], keep=True)
    assert [matcher.append(piece) for piece in ("one S", "TOP two x")] == ["one ", "STOP"]
    assert matcher.matched == "STOP"


def test_nothing_is_returned_after_a_match() -> None:
    matcher = StopStrings(["x"])
    assert matcher.append("axb") == "a"
    assert matcher.append("c") == ""
    assert matcher.flush() == ""


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_what_is_returned_is_the_text_up_to_the_first_stop_string(stops: list[str], pieces: list[str]) -> None:
    text, (returned, matched) = "".join(pieces), _run(stops, pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if matched is None:
        assert not ends
        assert "".join(returned) == text
    else:
        whole, of_whole = _run(stops, [text])
        assert ("".join(whole), of_whole) == ("".join(returned), matched)
        assert text.startswith("".join(returned) + matched)
        assert not any(stop in "".join(returned) for stop in stops)
        assert len("".join(returned)) + len(matched) <= max(ends)


BYTE_LEVEL = tiny_tokenizer.train(1024)


def _sentence_piece() -> tokenizers.Tokenizer:
    vocabulary = {"<s>": 0, "<0xE2>": 1, "<0x0A>": 2, "\u2581the": 3, "ma": 4, "\u00fc": 5}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(["<s>"])
    library.add_tokens(["<tool>", "\u2581\u2581"])  # Gemma's runs of spaces are added tokens
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
        (7, b"  ", "  "),
        (99, b"", ""),
    ],
)
def test_sentence_pieces_spaces_bytes_and_added_tokens_are_understood(
    token_id: int, token_bytes: bytes, text: str
) -> None:
    tokens = TokenBytes(_sentence_piece())
    assert (tokens[token_id], tokens.text(token_id)) == (token_bytes, text)
