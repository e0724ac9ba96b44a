"""What can only be seen on a card: copies to pinned memory, and memory that runs out inside a step."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from card.ceilings import seconds
from card.engine import add, any_prompt, run_to_the_end, start
from card.section import Findings
from llmservice_bench.results import Check
from llmservice_server.attention.swapped_blocks import SwappedBlocks
from llmservice_server.engine.plan import BlockCopy

_BLOCKS = 256
_LEFT_BYTES = 96 << 20


def swapping() -> Findings:
    """Blocks go to the pinned pool and come back elsewhere, the same; and the host does not wait for it."""
    caches = [torch.randn(2 * _BLOCKS, 8, 2, 16, 128, device="cuda").bfloat16() for _ in range(32)]
    before = [cache.clone() for cache in caches]
    swapped = SwappedBlocks(caches, _BLOCKS)
    out = [BlockCopy(2 * place, place) for place in range(_BLOCKS)]
    back = [BlockCopy(place, (2 * place + 7) % (2 * _BLOCKS)) for place in range(_BLOCKS)]
    swapped.swap_out(out)
    for cache in caches:
        cache[::2] = 0
    swapped.swap_in(back)
    torch.cuda.synchronize()
    wrong = 0
    for cache, old in zip(caches, before, strict=True):
        for copy in back:
            wrong += not torch.equal(cache[copy.target], old[2 * copy.source])
    taken_s = seconds(lambda: swapped.swap_out(out))
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    swapped.swap_out(out)
    host_s = time.perf_counter() - started_s
    torch.cuda.synchronize()
    moved = _BLOCKS * sum(cache[0].nbytes for cache in caches)
    return Findings(
        rows=[{"part": "swap out", "GiB/s": moved / taken_s / 2**30, "ms": taken_s * 1e3, "host ms": host_s * 1e3}],
        checks=[
            Check("swapped blocks that came back changed", "= 0", wrong),
            Check("share of a swap that the host waits for", "<= 0.2", host_s / taken_s),
        ],
    )


def out_of_memory(folder: Path) -> Findings:
    """Somebody else takes the card's memory: whoever needs more in a step is told, the others go on."""
    engine = start(folder, enforce_eager=True, prefill_chunk_tokens=8192)
    for number in range(4):
        add(engine, f"short{number}", any_prompt(16), 200)
    for _ in range(8):
        engine.step()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(max(0, free - _LEFT_BYTES), dtype=torch.uint8, device="cuda")
    add(engine, "long", any_prompt(8000), 4)
    outputs = run_to_the_end(engine)
    failed = [output.request_id for output in outputs if output.error is not None]
    del hog
    torch.cuda.empty_cache()
    add(engine, "after", any_prompt(4000), 4)
    after = run_to_the_end(engine)
    others = sum(name != "long" for name in failed)
    held = engine.stats().blocks_held
    return Findings(
        rows=[{"part": "out of memory", "failed": ", ".join(failed)}],
        checks=[
            Check("requests that fail beside the one that needs the memory", "= 0", others),
            Check("errors of the request that needs it", "= 1", failed.count("long")),
            Check("requests that end", "= 5", len(outputs)),
            Check("errors once the memory is back", "= 0", sum(output.error is not None for output in after)),
            Check("blocks held afterwards", "= 0", held),
        ],
    )
