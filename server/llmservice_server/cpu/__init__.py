"""What our own kernels on a CPU have in common."""
