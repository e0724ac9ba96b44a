"""The engine without HTTP: `LLM` in the caller's process, `AsyncLLM` in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import operator
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from tqdm import tqdm

from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.request import why_refused
from llmservice_server.ipc.client import EngineClient, EngineDeadError
from llmservice_server.ipc.metrics import Metrics
from llmservice_server.text.model_folder import served_folder
from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.types.messages import GenerateRequest, Ready, SamplingParams, TokenLogprobs

Prompt = str | Sequence[int]  # text, or token ids
_EXPECTED = "a text, a list of token ids, or a list of either"


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its `n` answers."""

    prompt: str | None  # None where token ids were given
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the second token and those after it, where requested


def make_requests(
    request_id: str,
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer,
    ready: Ready,
) -> list[GenerateRequest]:
    """One for each prompt. Raises ValueError where the engine could never serve one, with the numbers."""
    arrival_s = time.monotonic()
    requests = []
    for index, (prompt, params) in enumerate(zip(prompts, _params_list(sampling_params, len(prompts)), strict=True)):
        token_ids = _token_ids(index, prompt, tokenizer)
        request = GenerateRequest(
            request_id=request_id, prompt_token_ids=token_ids, sampling=params, arrival_s=arrival_s
        )
        if problem := why_refused(request, tokenizer.vocab_size, ready.max_request_tokens):
            raise ValueError(f"prompt {index}: {problem}")
        requests.append(request)
    return requests


def request_outputs(
    prompts: Sequence[Prompt], processor: OutputProcessor, outputs: Iterable[CompletionOutput]
) -> list[RequestOutput]:
    """The results in the order of the prompts; `outputs` are the whole answers to all of them."""
    answers: list[list[CompletionOutput]] = [[] for _ in prompts]
    prompt_logprobs: list[tuple[TokenLogprobs, ...]] = [()] * len(prompts)
    for output in sorted(outputs, key=lambda output: output.index):
        state = processor.states[output.index]
        of_prompt = answers[state.prompt_index]
        prompt_logprobs[state.prompt_index] = prompt_logprobs[state.prompt_index] or state.prompt_logprobs
        of_prompt.append(msgspec.structs.replace(output, index=len(of_prompt)))
    token_ids = {state.prompt_index: tuple(state.request.prompt_token_ids) for state in processor.states}
    return [
        RequestOutput(prompt if isinstance(prompt, str) else None, token_ids[index], tuple(of_prompt), logprobs)
        for index, (prompt, of_prompt, logprobs) in enumerate(zip(prompts, answers, prompt_logprobs, strict=True))
    ]


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. An empty list holds no prompt. Raises TypeError for another type."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts is of the type {type(prompts).__name__}, expected {_EXPECTED}")
    given = list(prompts)
    token_ids = [prompt for prompt in given if isinstance(prompt, int | np.integer)]
    if 0 < len(token_ids) < len(given):
        raise ValueError("prompts mixes token ids with texts or lists: expected one kind")
    return [token_ids] if token_ids else [prompt for prompt in given if not isinstance(prompt, int | np.integer)]


def _token_ids(index: int, prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    try:
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        if not isinstance(prompt, bytes | Mapping):
            return [operator.index(token) for token in prompt]
    except TypeError:  # of what has no tokens, and of half a surrogate pair
        pass
    raise ValueError(f"prompt {index} is {prompt!r:.80}, expected {_EXPECTED}")


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """One for each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [_checked(params or SamplingParams())] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} sampling parameters for {num_prompts} prompts: expected one, or one for each")
    return [_checked(one) for one in params]


def _checked(params: SamplingParams) -> SamplingParams:
    """With values of their types, which an engine in another process requires, and -1 for no top-k, as in vLLM.

    Raises ValueError for values of other types, TypeError for what is no SamplingParams.
    """
    if not isinstance(params, SamplingParams):
        raise TypeError(f"the sampling parameters are of the type {type(params).__name__}, expected SamplingParams")
    try:
        checked = msgspec.convert(msgspec.structs.asdict(params), SamplingParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"sampling parameters: {error}") from error
    return msgspec.structs.replace(checked, top_k=0) if checked.top_k == -1 else checked


class LLM:
    """A loaded model. `settings` are those of `EngineConfig`. Not thread-safe.

    Raises StartError where the engine cannot start or there is no usable tokenizer.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        from llmservice_server.runtime.startup import load_engine  # imports torch, which `AsyncLLM` does not need here

        config = EngineConfig(model=served_folder(Path(model)), **settings)
        self.tokenizer = Tokenizer.load(config.model, tokenizer_folder=config.tokenizer)
        self.engine = load_engine(config)
        self.metrics = Metrics("llmservice_", Path(model).name)
        self.metrics.set_ready(self.engine.ready)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete texts or lists of token ids; the results are in the order of the prompts.

        An answer that fails has an `error`, and the others continue. Raises ValueError, before anything is computed,
        where a prompt can never be served.
        """
        given = prompt_list(prompts)
        requests = make_requests(str(next(self._ids)), given, sampling_params, self.tokenizer, self.engine.ready)
        processor = OutputProcessor(requests, self.tokenizer, self.metrics, final_only=True)
        try:
            outputs = self._run(processor, use_tqdm)
        finally:  # an interrupted run leaves an idle engine behind
            self.engine.abort(processor.close())
        return request_outputs(given, processor, outputs)

    def _run(self, processor: OutputProcessor, use_tqdm: bool) -> list[CompletionOutput]:
        answers: list[CompletionOutput] = []
        for request in processor.requests:
            self.engine.add(request)
        with tqdm(total=len(processor.states), desc="prompts", unit="seq", disable=not use_tqdm) as bar:
            while self.engine.has_work:
                time.sleep(self.engine.wait_s())
                step = self.engine.step()
                self.metrics.set_stats(step.stats)
                finished = processor.process(step.outputs, time.monotonic())
                self.engine.abort(processor.take_stopped(), finished=True)
                answers += finished
                bar.update(len(finished))
                if use_tqdm and (elapsed_s := bar.format_dict["elapsed"]) > 0:
                    bar.set_postfix_str(f"{processor.num_tokens / elapsed_s:.0f} tok/s", refresh=False)
        return answers


class AsyncLLM:
    """`async with AsyncLLM(path) as llm:`, then any number of concurrent calls of `stream` and `generate`.

    `settings` are those of `EngineConfig`. Entering raises EngineDeadError where the engine cannot start, and
    ModelLoadError where there is no usable tokenizer.
    """

    def __init__(self, model: str | Path, *, log_level: str = "warning", **settings: Any) -> None:
        self._config = EngineConfig(model=served_folder(Path(model)), **settings)
        self._log_level = log_level
        self.metrics = Metrics("llmservice_", Path(model).name)
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
        prompts: Prompt | Iterable[Prompt],
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
