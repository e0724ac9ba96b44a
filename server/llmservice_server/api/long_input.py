"""Long bodies are parsed and tokenized in a few threads, so that nobody else's tokens wait for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from llmservice_server.api.error import ApiError, invalid
from llmservice_server.text.tokenizer import LONG_TEXT_BYTES, TextTooLongError, Tokenizer

_NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))  # the engine wants the rest
_BODY_BYTES = 2**20
_BODY_BYTES_PER_TOKEN = 64  # several times what text, ids or escaped JSON take

P = ParamSpec("P")
T = TypeVar("T")


class LongInput:
    """A bounded thread pool. Parsing holds the interpreter's lock, tokenizing a long text does not."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "long-input")

    async def run(self, num_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work`, in a thread where its input is long."""
        if num_bytes <= LONG_TEXT_BYTES:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args, **kwargs))


def all_token_ids(
    inputs: Sequence[str | list[int]],
    tokenizer: Tokenizer,
    max_tokens: int,
    param: str,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Raises ApiError (400) for a text that is certainly longer than `max_tokens`."""
    texts = [given for given in inputs if isinstance(given, str)]
    try:
        encoded = iter(tokenizer.encode_all(texts, add_special_tokens=add_special_tokens, max_tokens=max_tokens))
    except TextTooLongError as error:
        raise text_too_long(error, param) from error
    return [next(encoded) if isinstance(given, str) else given for given in inputs]


def text_too_long(error: TextTooLongError, param: str) -> ApiError:
    return invalid(str(error), param=param, code="context_length_exceeded")


def default_max_body_bytes(max_model_len: int) -> int:
    """Room for a prompt that fills the context, however it is written, and for what stands around it."""
    return _BODY_BYTES + _BODY_BYTES_PER_TOKEN * max_model_len
