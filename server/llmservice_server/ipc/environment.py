"""The environment of processes that compute: how threads wait, and how memory is allocated."""

from __future__ import annotations

from collections.abc import Mapping

OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""A decode step is dozens of short parallel regions. A thread that sleeps between two of them has to be woken, which
takes longer than most regions; one that spins takes a core from other threads, on shared cores even from the thread
that it waits for. A thousand iterations bridge the gap between two products on an idle machine and cost other processes
little; libgomp's default of 300,000 stalls all threads as soon as there are more busy threads than cores. Variables
that are set already take precedence, as in `GOMP_SPINCOUNT=20000 llmservice bench profile MODEL`, which measures it.
"""

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""torch then asks the kernel for huge pages for tensors above 2 MiB. Every token reads all the weights: with pages of
4 KiB, that is a page-table lookup for every few dozen cache lines."""

CUDA_ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Every step has another number of tokens, so the sizes of its activations vary. In segments of fixed sizes they leave
gaps: torch then reserves more than the profiling pass saw allocated, out of memory that the KV cache already holds.
Segments that grow and shrink by mapping pages have no gaps. CUDA graphs are compatible: torch keeps their private pools
in ordinary segments (pytorch/pytorch#128068), or, with pytorch/pytorch#194767, in expandable ones; their memory is
never freed, so it leaves no gaps. With a driver that cannot map pages, torch warns and uses ordinary segments."""

_OLDER_ALLOCATOR_NAMES = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}


def for_computing(given: Mapping[str, str]) -> dict[str, str]:
    """`given` with defaults for what it does not set. An allocator configured under any name stays as it is."""
    allocator = {} if _OLDER_ALLOCATOR_NAMES & given.keys() else CUDA_ALLOCATOR
    return OPENMP | HUGE_PAGES | allocator | dict(given)
