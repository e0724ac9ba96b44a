"""What is measured on a GPU: its ceilings, our kernels, a model's steps, and what may go wrong in them."""
