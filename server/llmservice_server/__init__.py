"""The inference server. `LLM`, `AsyncLLM` and `SamplingParams` are its offline use, loaded when first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmservice_server.offline.async_llm import AsyncLLM
    from llmservice_server.offline.llm import LLM
    from llmservice_server.offline.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "SamplingParams"]

_HOMES = {"LLM": "llm", "AsyncLLM": "async_llm", "SamplingParams": "sampling_params"}


def __getattr__(name: str) -> Any:
    """Import torch only for those who ask for an engine: `import llmservice_server` stays a matter of milliseconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import os
    from importlib import import_module

    from llmservice_server.environment import HUGE_PAGES

    for variable, value in HUGE_PAGES.items():  # how threads wait is the caller's affair: it is the caller's process
        os.environ.setdefault(variable, value)
    return getattr(import_module(f"{__name__}.offline.{_HOMES[name]}"), name)
