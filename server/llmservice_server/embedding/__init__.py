"""Embeddings from the same decoder: a time window and length buckets instead of a KV cache."""
