"""How OpenMP's threads wait: the environment of a process that computes, to be there before torch is imported."""

from __future__ import annotations

ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""A decode step is a hundred short rounds of all threads, and a thread that sleeps between two of them is woken in some
60 us. Spinning spares that and takes a core from whoever has work for it: where cores are shared, from the very thread
that is waited for. The products of a step of one sequence (12 layers of 768, bfloat16, two cores), p50 and p90 in ms:

| turns  | idle machine | beside one busy process |
|--------|--------------|-------------------------|
| 0      | 6.2, 6.8     | 6.2, 7.1                |
| 1,000  | 4.4, 4.8     | 8.5, 9.5                |
| 4,000  | 4.5, 5.1     | 15.9, 18.4              |
| 20,000 | 4.3, 4.7     | 13.0, 51.4              |

libgomp's own 300,000 takes seconds beside eight. What the environment says already goes first.
"""
