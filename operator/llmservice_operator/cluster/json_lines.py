"""A stream of JSON values, one a line, as a watch's connection brings it: in pieces that end anywhere."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

LONGEST_BYTES = 16 * 2**20
"""Of a line: ten times what the API server takes for an object."""


async def json_lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    """Each as soon as its line is whole; a line that the end cuts off is left out.

    Raises ValueError for a line that is no JSON, or that grows past LONGEST_BYTES.
    """
    held: list[bytes] = []
    async for chunk in chunks:
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join([*held, lines[0]])
            held = []
        for line in lines:
            if line.strip():
                yield json.loads(line)
        held.append(rest)
        if sum(map(len, held)) > LONGEST_BYTES:
            raise ValueError(f"a line is longer than {LONGEST_BYTES} bytes")
