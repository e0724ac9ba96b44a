"""What may be measured on a card, in the order of what is most needed, should the time not do for all."""

SECTIONS = (
    "ceilings",
    "agreement",
    "kernels",
    "attention_race",
    "sampling",
    "swapping",
    "checkpoint",
    "start",
    "steps",
    "throughput",
    "host_syncs",
    "out_of_memory",
    "overlap",
)
