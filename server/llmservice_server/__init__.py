"""The inference server. `LLM`, `AsyncLLM` and `SamplingParams` use its engine offline; they are imported on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmservice_server.offline import LLM, AsyncLLM
    from llmservice_server.types.messages import SamplingParams

__all__ = ["LLM", "AsyncLLM", "SamplingParams"]

_MODULES = {"LLM": "offline", "AsyncLLM": "offline", "SamplingParams": "types.messages"}


def __getattr__(name: str) -> Any:
    """Import torch only when `LLM` is used: `import llmservice_server` takes milliseconds."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import os
    from importlib import import_module

    from llmservice_server.ipc.environment import HUGE_PAGES

    for variable, value in HUGE_PAGES.items():  # the caller's process, so not how its threads wait
        os.environ.setdefault(variable, value)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
