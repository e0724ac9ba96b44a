"""What fits on a GPU and how long steps take: memory, sequences, the latency model."""
