"""A tiny checkpoint with a real tokenizer, for demos, tests and benchmarks."""
