"""GPU kernels of our own, in Triton: small, each with the shapes it takes and the bytes it must move.

Nothing outside this room and its callers on a GPU imports Triton. With TRITON_INTERPRET=1 set before the first import
the same kernels run on a CPU, slowly: that is how they are tested where there is no card.
"""
