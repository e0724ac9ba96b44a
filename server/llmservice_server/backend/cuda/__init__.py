"""NVIDIA GPUs: Triton kernels, CUDA graphs, and the probes that choose between kernels."""
