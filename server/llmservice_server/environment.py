"""The environment of a process that computes: torch and OpenMP read it once, so it must be there before torch is."""

from __future__ import annotations

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

ENVIRONMENT = OPENMP | HUGE_PAGES
