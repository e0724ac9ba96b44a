"""`LLM(path).generate(prompts)`: the engine in this process, for scripts and batch jobs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.metrics import Metrics
from llmservice_server.offline.job import Job, Prompt, RequestOutput, as_params, as_prompts
from llmservice_server.offline.sampling_params import SamplingParams
from llmservice_server.text.tokenizer import Tokenizer


class LLM:
    """A loaded model. `settings` are those of `EngineConfig`. Not for several threads at once.

    Raises StartError where the engine cannot start, TokenizerLoadError where there is no usable tokenizer.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        config = EngineConfig(model=Path(model), **settings)
        self.tokenizer = Tokenizer.load(config.model)
        self.engine = Engine(config)
        self.metrics = Metrics("llmservice_", config.model.name)
        self.metrics.set_ready(self.engine.ready)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        sampling_params: SamplingParams | Many[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete texts or lists of token ids; the results are in the order of the prompts.

        A failure of one answer is told in its `error`, the others go on. Raises ValueError, before anything is
        computed, where a prompt can never be served.
        """
        given = as_prompts(prompts)
        jobs = []
        for index, (prompt, params) in enumerate(zip(given, as_params(sampling_params, len(given)), strict=True)):
            try:
                jobs.append(Job(str(next(self._ids)), prompt, params, self.tokenizer, self.engine.ready))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        try:
            self._run(jobs, use_tqdm)
        finally:  # an interrupted run leaves an idle engine behind
            self.engine.abort([request_id for job in jobs for request_id in job.close(self.metrics)])
        return [job.result for job in jobs]

    def _run(self, jobs: Many[Job], use_tqdm: bool) -> None:
        job_of = {message.request_id: job for job in jobs for message in job.messages}
        for message in (message for job in jobs for message in job.messages):
            self.engine.add(message)
        with tqdm(total=len(job_of), desc="prompts", unit="seq", disable=not use_tqdm) as bar:
            while self.engine.has_work:
                time.sleep(self.engine.wait_s())
                step = self.engine.step()
                self.metrics.set_stats(step.stats)
                for output in step.outputs:
                    job = job_of.get(output.request_id)
                    delta = job.advance(output, self.metrics) if job is not None else None
                    if delta is not None and delta.finish_reason is not None:
                        bar.update()
                self._end_stopped(jobs)
                if use_tqdm:
                    bar.set_postfix_str(_rate(jobs, bar.format_dict["elapsed"]), refresh=False)

    def _end_stopped(self, jobs: Many[Job]) -> None:
        if stopped := [request_id for job in jobs for request_id in job.take_stopped()]:
            self.engine.abort(stopped, finished=True)


def _rate(jobs: Many[Job], elapsed_s: float) -> str:
    num_tokens = sum(job.num_tokens for job in jobs)
    return f"{num_tokens / elapsed_s:.0f} tok/s" if elapsed_s > 0 else ""
