"""How OpenMP's threads wait: the environment of a process that computes, to be there before torch is imported."""

from __future__ import annotations

ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""A decode step is a hundred short rounds of all threads. A thread that sleeps between two of them is woken in some
60 us; on two idle cores the products of a step of one sequence took 8.2 ms so, and 6.4 ms with threads that spin a
little before they sleep. Spinning takes a core from whoever has work for it, where cores are shared, and from the very
thread that is waited for: libgomp's own 300,000 turns made of these 8 ms 50 to 250 beside one busy process, and
seconds beside eight; 1,000 turns, some 15 us, took 10.5 beside one, and no longer than sleepers beside eight."""
