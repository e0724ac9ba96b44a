"""Scheduling and the paged KV cache, without torch: the engine calls a runner."""
