"""CPUs: kernels compiled by numba, and matrices in oneDNN's layout."""
