"""Attention over the paged KV cache: one small interface, one backend per way of computing it."""
