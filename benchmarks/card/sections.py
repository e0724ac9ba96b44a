"""What may be measured on a card, in the order of what is most needed, should the time not do for all."""

from __future__ import annotations

SECTIONS: dict[str, int] = {
    "ceilings": 5,
    "checkpoint": 40,
    "start": 45,
    "steps": 15,
    "host_syncs": 20,
    "throughput": 35,
    "transformers": 110,
    "kernels": 15,
    "agreement": 45,
    "attention_race": 10,
    "sampling": 15,
    "swapping": 10,
    "out_of_memory": 25,
    "overlap": 95,
}
"""Seconds that each is expected to take of an H200's time; none is begun where fewer are left. Nobody has measured
them: kernels were compiled for Hopper on a CPU (about 2 s a shape), the rest follows from bytes and FLOPs."""
GRACE_S = 60
"""A section that takes so much longer than that hangs: its process shows where, and ends."""
