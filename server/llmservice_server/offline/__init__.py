"""The engine without HTTP: `LLM` for scripts and batch jobs, `AsyncLLM` for programs with an event loop."""
