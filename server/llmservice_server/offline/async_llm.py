"""`AsyncLLM`: the engine in a process of its own, for programs with an event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from collections.abc import Sequence as Many
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine_client import EngineClient, EngineDeadError
from llmservice_server.messages import Ready
from llmservice_server.metrics import Metrics
from llmservice_server.offline.job import CompletionOutput, Job, Prompt, RequestOutput, as_params, as_prompts
from llmservice_server.offline.sampling_params import SamplingParams
from llmservice_server.text.tokenizer import Tokenizer


class AsyncLLM:
    """`async with AsyncLLM(path) as llm:`, then `stream` and `generate`, as many at once as you like.

    `settings` are those of `EngineConfig`. Entering raises EngineDeadError where the engine cannot start, and
    TokenizerLoadError where there is no usable tokenizer.
    """

    def __init__(self, model: str | Path, *, log_level: str = "warning", **settings: Any) -> None:
        self._config = EngineConfig(model=Path(model), **settings)
        self._log_level = log_level
        self.metrics = Metrics("llmservice_", self._config.model.name)
        self._ids = itertools.count()

    async def __aenter__(self) -> Self:
        self.tokenizer = await asyncio.to_thread(Tokenizer.load, self._config.model)
        ready = asyncio.Event()

        def on_ready(told: Ready) -> None:
            self.metrics.set_ready(told)
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
        """What each step adds to each of the `n` answers. Leaving early (`aclosing`) aborts them.

        Raises ValueError where the prompt can never be served, EngineDeadError where the engine has ended.
        """
        async for delta in self._advance(self._job(prompt, sampling_params or SamplingParams())):
            yield delta

    async def generate(
        self,
        prompts: Prompt | Many[Prompt],
        sampling_params: SamplingParams | Many[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """As `LLM.generate`: the results in the order of the prompts."""
        given = as_prompts(prompts)
        pairs = zip(given, as_params(sampling_params, len(given)), strict=True)
        jobs = [self._job(prompt, params) for prompt, params in pairs]
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(self._finish(job))
        return [job.result for job in jobs]

    def _job(self, prompt: Prompt, params: SamplingParams) -> Job:
        if self._client.ready is None:
            raise EngineDeadError(self._client.failure or "the engine is not running")
        return Job(str(next(self._ids)), prompt, params, self.tokenizer, self._client.ready)

    async def _finish(self, job: Job) -> None:
        async for _ in self._advance(job):
            pass

    async def _advance(self, job: Job) -> AsyncIterator[CompletionOutput]:
        stream = self._client.generate(job.messages)
        try:
            while job.num_unfinished:
                deltas = [job.advance(output, self.metrics) for output in await stream.next()]
                self._client.abort(job.take_stopped(), finished=True)
                for delta in deltas:
                    if delta is not None:
                        yield delta
        finally:
            self._client.abort(job.close(self.metrics))
