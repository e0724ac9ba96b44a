"""Lines out of pieces, wherever a connection cuts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_operator.cluster import json_lines as module
from llmservice_operator.cluster.json_lines import json_lines


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def read(*chunks: bytes) -> list[Any]:
    return [value async for value in json_lines(pieces(*chunks))]


@given(values=st.lists(st.dictionaries(st.text(), st.text())), cuts=st.lists(st.integers(0, 400)))
async def test_whatever_the_cuts_the_values_are_the_same(values: list[Any], cuts: list[int]) -> None:
    text = b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    chunks = [text[begin:end] for begin, end in pairwise(places)]

    assert await read(*chunks) == values


async def test_a_line_that_the_end_cuts_off_is_left_out() -> None:
    assert await read(b'{"a": 1}\n{"b"', b": 2") == [{"a": 1}]


async def test_empty_lines_are_nothing() -> None:
    assert await read(b"\n\n 7 \n\n") == [7]


async def test_a_line_without_end_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_BYTES", 8)

    with pytest.raises(ValueError, match="longer than 8 bytes"):
        await read(b"1234", b"5678", b"9")
