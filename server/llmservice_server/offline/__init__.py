"""The engine without a server: `LLM` for scripts and batch jobs, `AsyncLLM` for programs with an event loop."""
