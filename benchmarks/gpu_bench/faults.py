"""Swapping to pinned memory, and running out of memory within a step."""

from __future__ import annotations

import torch

from gpu_bench.bench import Bench, add, run_until_idle, unique_prompt
from gpu_bench.device import host_seconds, seconds
from gpu_bench.sections import Findings
from llmservice_bench.results import Check
from llmservice_server.engine.interfaces import BlockCopy
from llmservice_server.runtime.runner import SwappedBlocks


def swapping(bench: Bench) -> Findings:
    """Blocks are copied to the pinned pool and back to other places, unchanged and without waits of the host."""
    gpu, count = bench.gpu, bench.sizes.swapped_blocks
    _, kv_heads, head_dim = bench.sizes.heads
    shape = (2 * count, kv_heads, 2, 16, head_dim)
    layers = bench.sizes.config["num_hidden_layers"]
    caches = [torch.randn(shape, device=gpu.device).bfloat16() for _ in range(layers)]
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
    taken_s = seconds(gpu, lambda: swapped.swap_out(out))
    host_s = host_seconds(gpu, lambda: swapped.swap_out(out))

    def out_and_in() -> None:
        swapped.swap_out(out)
        swapped.swap_in(back)

    waits = gpu.host_waits(out_and_in)
    moved = count * sum(cache[0].nbytes for cache in caches)
    return Findings(
        rows=[
            {
                "part": "swap out", "GiB/s": moved / taken_s / 2**30, "ms": taken_s * 1e3, "host ms": host_s * 1e3,
                "waits at": ", ".join(sorted({*waits})),
            }
        ],
        checks=[
            Check("swapped blocks with changed content", "= 0", wrong),
            Check("host synchronisations of a swap out and in", "= 0", len(waits)),
        ],
    )  # fmt: skip


def out_of_memory(bench: Bench) -> Findings:
    """With little free memory, the request that needs more in a step gets an error, and the others continue."""
    bench.clear()
    sizes = bench.sizes
    engine = bench.start(enforce_eager=True, prefill_chunk_tokens=sizes.max_num_batched_tokens)
    shorts = min(4, sizes.max_num_seqs - 1)
    for number in range(shorts):
        add(engine, f"short{number}", unique_prompt(8), sizes.memory_tokens)
    for _ in range(4):
        engine.step()
    with bench.gpu.memory_taken(sizes.left_bytes):
        add(engine, "long", unique_prompt(sizes.memory_prompt), 4)
        outputs = run_until_idle(engine)
    failed = [output.request_id for output in outputs if output.error is not None]
    add(engine, "after", unique_prompt(sizes.memory_prompt // 2), 4)
    after = run_until_idle(engine)
    others = sum(name != "long" for name in failed)
    return Findings(
        rows=[{"part": "out of memory", "failed": ", ".join(failed)}],
        checks=[
            Check("other requests that fail", "= 0", others),
            Check("errors of the request that needs more memory", "= 1", failed.count("long")),
            Check("requests that finish", f"= {shorts + 1}", len(outputs)),
            Check("errors after the memory is free again", "= 0", sum(output.error is not None for output in after)),
            Check("blocks held afterwards", "= 0", engine.stats().blocks_held),
        ],
    )
