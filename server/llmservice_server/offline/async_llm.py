"""`AsyncLLM`: the engine in a process of its own, for programs with an event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llmservice_server.engine.config import EngineConfig
from llmservice_server.ipc.client import EngineClient, EngineDeadError
from llmservice_server.ipc.metrics import Metrics
from llmservice_server.offline.requests import Prompt, RequestOutput, make_requests, prompt_list, request_outputs
from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.types.messages import Ready, SamplingParams


class AsyncLLM:
    """`async with AsyncLLM(path) as llm:`, then any number of concurrent calls of `stream` and `generate`.

    `settings` are those of `EngineConfig`. Entering raises EngineDeadError where the engine cannot start, and
    TokenizerLoadError where there is no usable tokenizer.
    """

    def __init__(self, model: str | Path, *, log_level: str = "warning", **settings: Any) -> None:
        self._config = EngineConfig(model=Path(model), **settings)
        self._log_level = log_level
        self.metrics = Metrics("llmservice_", self._config.model.name)
        self._ids = itertools.count()

    async def __aenter__(self) -> Self:
        self.tokenizer = await asyncio.to_thread(
            Tokenizer.load, self._config.model, tokenizer_folder=self._config.tokenizer
        )
        ready = asyncio.Event()

        def on_ready(message: Ready) -> None:
            self.metrics.set_ready(message)
            ready.set()

        self._client = EngineClient(self._config, self._log_level, on_ready=on_ready, on_stats=self.metrics.set_stats)
        self._running = asyncio.create_task(self._client.run())
        started = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait([started, self._running], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._stop()
            raise
        finally:
            started.cancel()
        if self._client.ready is None:
            await self._running
            raise EngineDeadError(self._client.failure or "the engine process has ended")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        await self._client.stop()
        await self._running

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[CompletionOutput]:
        """The pieces of each of the `n` answers, as soon as their text is certain. Leaving early (`aclosing`) aborts.

        Raises ValueError where the prompt can never be served, EngineDeadError where the engine has ended.
        """
        processor = self._processor([prompt], sampling_params, final_only=False)
        async with aclosing(self._outputs(processor)) as outputs:
            async for output in outputs:
                yield output

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """As `LLM.generate`: the results in the order of the prompts."""
        given = prompt_list(prompts)
        processor = self._processor(given, sampling_params, final_only=True)
        return request_outputs(given, processor, [output async for output in self._outputs(processor)])

    def _processor(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        final_only: bool,
    ) -> OutputProcessor:
        ready = self._client.require_ready()
        requests = make_requests(str(next(self._ids)), prompts, sampling_params, self.tokenizer, ready)
        return OutputProcessor(requests, self.tokenizer, self.metrics, final_only=final_only)

    async def _outputs(self, processor: OutputProcessor) -> AsyncGenerator[CompletionOutput]:
        stream = self._client.generate(processor.requests)
        try:
            while processor.num_unfinished:
                outputs = processor.process(await stream.next(), time.monotonic())
                self._client.abort(processor.take_stopped(), finished=True)
                for output in outputs:
                    yield output
        finally:
            self._client.abort(processor.close())
