"""The engine: scheduling, the paged KV cache, and the steps on the device."""
