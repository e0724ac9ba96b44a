"""The sections of `make bench-gpu`: ceilings, kernels, steps, throughput and faults on a GPU."""
