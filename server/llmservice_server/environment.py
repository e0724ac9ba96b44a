"""The environment of a process that computes: torch and OpenMP read it once, so it must be there before torch is."""

from __future__ import annotations

from collections.abc import Mapping

OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""A decode step is dozens of short rounds of all threads. A thread that sleeps between two of them must be woken, which
takes longer than most rounds; one that spins takes a core from whoever has work for it: where cores are shared, from
the very thread that is waited for. A thousand turns bridge the gap between two products on an idle machine and cost
neighbours little; libgomp's own 300,000 stall everybody as soon as there are more busy threads than cores. What the
environment says already goes first, here as in `GOMP_SPINCOUNT=20000 llmservice bench profile MODEL`, which shows what
a number of turns does on a machine.
"""

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""torch asks the kernel for huge pages where a tensor is larger than one (2 MiB). Every token reads all the weights: by
pages of 4 KiB, that is a look into the page tables for every few dozen of its cache lines."""

CUDA_ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Every step has another number of tokens, so its activations are of ever other sizes. In segments of fixed sizes they
leave gaps: more is then reserved than the profiling pass saw allocated, of memory that the KV cache has by then.
Segments that grow and shrink by mapping pages have no gaps. CUDA graphs go with them: torch keeps the graphs' private
pools in ordinary segments (pytorch/pytorch#128068), or, where pytorch/pytorch#194767 is in, in expandable ones; nothing
of theirs is freed, so nothing of theirs leaves a gap. A driver that cannot map pages makes torch warn
and do without."""

_ALLOCATORS_OLDER_NAMES = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}


def for_computing(given: Mapping[str, str]) -> dict[str, str]:
    """`given`, and what it does not say already; who has set the allocator up by any name of it keeps it as it is."""
    allocator = {} if _ALLOCATORS_OLDER_NAMES & given.keys() else CUDA_ALLOCATOR
    return OPENMP | HUGE_PAGES | allocator | dict(given)
