"""Reading responses of other servers with a bounded size."""

from __future__ import annotations

import aiohttp


async def read_bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The whole body; raises ValueError where it is longer than `limit_bytes`."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise ValueError(f"the answer is longer than {limit_bytes} bytes")
    return bytes(body)
