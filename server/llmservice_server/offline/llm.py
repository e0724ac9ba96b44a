"""`LLM(path).generate(prompts)`: the engine in this process, for scripts and batch jobs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llmservice_server.engine.config import EngineConfig
from llmservice_server.ipc.metrics import Metrics
from llmservice_server.offline.requests import Prompt, RequestOutput, make_requests, prompt_list, request_outputs
from llmservice_server.runtime.startup import load_engine
from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.types.messages import SamplingParams


class LLM:
    """A loaded model. `settings` are those of `EngineConfig`. Not thread-safe.

    Raises StartError where the engine cannot start, TokenizerLoadError where there is no usable tokenizer.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        config = EngineConfig(model=Path(model), **settings)
        self.tokenizer = Tokenizer.load(config.model, tokenizer_folder=config.tokenizer)
        self.engine = load_engine(config)
        self.metrics = Metrics("llmservice_", config.model.name)
        self.metrics.set_ready(self.engine.ready)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
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
