"""Our GPU kernels without a GPU: interpreted, compiled, and late as CUDA is."""
