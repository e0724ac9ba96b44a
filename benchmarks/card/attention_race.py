"""The race that `--attention auto` runs when an engine starts, for chunks of several sizes; the loser's time too."""

from __future__ import annotations

from card.section import Findings
from card.stand import Stand
from llmservice_server.attention.base import KVCacheShape
from llmservice_server.attention.chunk_race import race_for_chunks


def measure(stand: Stand) -> Findings:
    """The model's shape, with and without a window."""
    found, sizes = Findings(), stand.sizes
    for window in (None, sizes.context):
        shape = KVCacheShape(*sizes.heads, (window,), 16, sizes.dtype)
        for num_tokens in sizes.race_tokens:
            verdict = race_for_chunks(shape, sizes.dtype, stand.card.device, num_tokens)
            found.rows.append({
                "part": "attention race", "window": window, "chunk": num_tokens // 2, "after": num_tokens // 2,
                "winner": verdict.name, "times": verdict.reason,
            })  # fmt: skip
    return found
