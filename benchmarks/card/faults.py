"""What can only be seen on a card: copies to pinned memory, and memory that runs out inside a step."""

from __future__ import annotations

import time

import torch

from card.card import seconds
from card.section import Findings
from card.stand import Stand, add, any_prompt, run_to_the_end
from llmservice_bench.results import Check
from llmservice_server.attention.swapped_blocks import SwappedBlocks
from llmservice_server.engine.plan import BlockCopy


def swapping(stand: Stand) -> Findings:
    """Blocks go to the pinned pool and come back elsewhere, the same; and the host does not wait for it."""
    card, count = stand.card, stand.sizes.swapped_blocks
    _, kv_heads, head_dim = stand.sizes.heads
    shape = (2 * count, kv_heads, 2, 16, head_dim)
    layers = stand.sizes.config["num_hidden_layers"]
    caches = [torch.randn(shape, device=card.device).bfloat16() for _ in range(layers)]
    before = [cache.clone() for cache in caches]
    swapped = SwappedBlocks(caches, count)
    out = [BlockCopy(2 * place, place) for place in range(count)]
    back = [BlockCopy(place, (2 * place + 7) % (2 * count)) for place in range(count)]
    swapped.swap_out(out)
    for cache in caches:
        cache[::2] = 0
    swapped.swap_in(back)
    wrong = 0
    for cache, old in zip(caches, before, strict=True):
        came, went = [copy.target for copy in back], [2 * copy.source for copy in back]
        wrong += int((cache[came] != old[went]).flatten(1).any(dim=1).sum())
    taken_s = seconds(card, lambda: swapped.swap_out(out))
    card.synchronize()
    started_s = time.perf_counter()
    swapped.swap_out(out)
    host_s = time.perf_counter() - started_s
    card.synchronize()

    def there_and_back() -> None:
        swapped.swap_out(out)
        swapped.swap_in(back)

    waits = card.host_waits(there_and_back)
    moved = count * sum(cache[0].nbytes for cache in caches)
    return Findings(
        rows=[
            {
                "part": "swap out", "GiB/s": moved / taken_s / 2**30, "ms": taken_s * 1e3, "host ms": host_s * 1e3,
                "waits at": ", ".join(sorted({*waits})),
            }
        ],
        checks=[
            Check("swapped blocks that came back changed", "= 0", wrong),
            Check("host synchronisations of a swap out and in", "= 0", len(waits)),
        ],
    )  # fmt: skip


def out_of_memory(stand: Stand) -> Findings:
    """Somebody else takes the card's memory: whoever needs more in a step is told, the others go on."""
    stand.clear()
    sizes = stand.sizes
    engine = stand.start(enforce_eager=True, prefill_chunk_tokens=sizes.max_num_batched_tokens)
    shorts = min(4, sizes.max_num_seqs - 1)
    for number in range(shorts):
        add(engine, f"short{number}", any_prompt(8), sizes.memory_tokens)
    for _ in range(4):
        engine.step()
    with stand.card.crowded(sizes.left_bytes):
        add(engine, "long", any_prompt(sizes.memory_prompt), 4)
        outputs = run_to_the_end(engine)
    failed = [output.request_id for output in outputs if output.error is not None]
    add(engine, "after", any_prompt(sizes.memory_prompt // 2), 4)
    after = run_to_the_end(engine)
    others = sum(name != "long" for name in failed)
    return Findings(
        rows=[{"part": "out of memory", "failed": ", ".join(failed)}],
        checks=[
            Check("requests that fail beside the one that needs the memory", "= 0", others),
            Check("errors of the request that needs it", "= 1", failed.count("long")),
            Check("requests that end", f"= {shorts + 1}", len(outputs)),
            Check("errors once the memory is back", "= 0", sum(output.error is not None for output in after)),
            Check("blocks held afterwards", "= 0", engine.stats().blocks_held),
        ],
    )
