"""Errors that cross layers. Each message is one sentence, for the client or the log."""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)


class StartError(Exception):
    """The engine cannot start; the message says what is wrong, what was expected and what to do."""


class ConfigError(StartError):
    """A setting is out of range, or two settings contradict each other."""


class ModelLoadError(StartError):
    """The model folder is missing something, is broken, or holds a model that this server cannot run."""


class OutOfMemoryError(StartError):
    """Weights and KV cache do not fit into the memory that the engine may use."""


class AdapterError(ValueError):
    """The adapter cannot be used; the message says what is wrong, what was expected and what to do."""


class GrammarError(ValueError):
    """The grammar cannot be used; the message says why, in one line."""


def request_failure(error: Exception) -> str:
    """Log an error of the host that concerns one request; returns the message for its client."""
    _LOG.warning("a request failed on the host", exc_info=error)
    return failure_sentence(error)


def first_line(error: Exception) -> str:
    """The error's class and the first line of its message: what follows is often a trace of a compiler or a driver."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(": ")


def failure_sentence(error: Exception) -> str:
    return f"the engine failed to compute this request ({type(error).__name__}): see the server's log"
