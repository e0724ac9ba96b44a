from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llmservice_local.node import logs


@pytest.mark.parametrize(
    ("text", "lines", "expected"),
    [
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\n", 9, "a\nb\n"),
        ("a\nb\n", 0, ""),
        ("", 3, ""),
        ("x" * 200_000 + "\nlast\n", 1, "last\n"),
        (("y" * 99 + "\n") * 2000, 1500, ("y" * 99 + "\n") * 1500),
    ],
)
def test_tail_is_the_last_lines(tmp_path: Path, text: str, lines: int, expected: str) -> None:
    path = tmp_path / "log"
    path.write_text(text, encoding="utf-8")
    assert path.read_bytes()[logs.tail(path, lines) :].decode() == expected


def test_termination_message_is_bounded_in_lines_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join(map(str, range(100))) + "\n", encoding="utf-8")
    assert logs.termination_message(path).splitlines() == [str(line) for line in range(20, 100)]
    path.write_text("z" * 5000, encoding="utf-8")
    assert len(logs.termination_message(path)) == 2048
    assert logs.termination_message(tmp_path / "none") == ""


async def test_follower_gets_what_is_written_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("first\n", encoding="utf-8")
    growing = True
    found: list[bytes] = []

    async def follow() -> None:
        async for chunk in logs.read(path, 0, None, lambda: growing):
            found.append(chunk)  # noqa: PERF401 - the test looks at it while it grows

    following = asyncio.create_task(follow())
    while not found:
        await asyncio.sleep(0)
    with path.open("a", encoding="utf-8") as log:
        log.write("last\n")
    growing = False
    await asyncio.wait_for(following, 5)
    assert b"".join(found) == b"first\nlast\n"


async def test_limit_in_bytes_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("0123456789", encoding="utf-8")
    assert [chunk async for chunk in logs.read(path, 2, 3, lambda: False)] == [b"234"]
