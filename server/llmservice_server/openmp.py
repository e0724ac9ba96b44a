"""How OpenMP's threads wait: the environment of a process that computes, to be there before torch is imported."""

from __future__ import annotations

ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""A decode step is a hundred short rounds of all threads. A thread that sleeps between two of them must be woken, which
takes longer than most rounds; one that spins takes a core from whoever has work for it: where cores are shared, from
the very thread that is waited for. A thousand turns bridge the gap between two products on an idle machine, not what
lies between two layers, and cost neighbours little; libgomp's own 300,000 stall everybody as soon as there are more
busy threads than cores. What the environment says already goes first, here as in
`GOMP_SPINCOUNT=20000 llmservice bench profile MODEL`, which shows what a number of turns does on a machine.
"""
