"""A text never has fewer tokens than its length alone tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from llmservice_server.text.token_bound import most_bytes_per_token
from llmservice_server.tiny.tokenizer import train


def _tiny(change: Callable[[Tokenizer], None]) -> Tokenizer:
    library = train(400)
    change(library)
    return library


def _normalized(*parts: normalizers.Normalizer) -> Tokenizer:
    def change(library: Tokenizer) -> None:
        library.normalizer = normalizers.Sequence([*parts])

    return _tiny(change)


def _added(token: AddedToken) -> Tokenizer:
    return _tiny(lambda library: library.add_tokens([token]))


def _byte_fallback(*, complete: bool) -> Tokenizer:
    pieces = ["<unk>", "\u2581", "a", "b", "ab", "\u2581ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: index for index, piece in enumerate(pieces if complete else pieces[:-1])}
    merges = [("a", "b"), ("\u2581", "ab")]
    library = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return library


BOUNDED = {
    "byte level": _tiny(lambda _: None),
    "NFC": _normalized(normalizers.NFC()),
    "NFKC": _normalized(normalizers.NFKC()),
    "an added token": _added(AddedToken("a very long added token")),
    "byte fallback": _byte_fallback(complete=True),
}
TEXTS = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab \n\u212a\U0001d7d9e\u0301\u1100\u1161\u11a8")),
    max_size=200,
)


@pytest.mark.parametrize("library", BOUNDED.values(), ids=BOUNDED)
@settings(deadline=None, max_examples=60)
@given(text=TEXTS)
def test_a_token_stands_for_no_more_bytes_than_the_bound(library: Tokenizer, text: str) -> None:
    most = most_bytes_per_token(library)
    assert most is not None
    num_tokens = len(library.encode(text, add_special_tokens=False).ids)
    assert len(text.encode()) <= most * num_tokens


def _dropping_spaces(library: Tokenizer) -> None:
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(_tiny(_dropping_spaces), id="spaces are dropped"),
        pytest.param(_normalized(normalizers.Strip()), id="stripped"),
        pytest.param(_normalized(normalizers.Replace(Regex(" +"), " ")), id="replaced by a pattern"),
        pytest.param(_normalized(normalizers.Replace("aa", "")), id="replaced by nothing"),
        pytest.param(_added(AddedToken("<end>", rstrip=True)), id="a token that takes the spaces behind it"),
        pytest.param(_byte_fallback(complete=False), id="a byte without a token"),
        pytest.param(Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")), id="whole words"),
    ],
)
def test_where_text_may_vanish_there_is_no_bound(library: Tokenizer) -> None:
    assert most_bytes_per_token(library) is None
