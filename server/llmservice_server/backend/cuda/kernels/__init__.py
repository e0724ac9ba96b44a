"""Triton kernels: each with the shapes it takes and the bytes it moves."""
