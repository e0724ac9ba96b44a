"""What a step computes and how long it takes, so that the planner's latency model can be compared with it."""

from __future__ import annotations

from typing import NamedTuple

from llmservice_planner.sizing.latency import StepBatch, attention_pairs
from llmservice_server.engine.interfaces import Plan
from llmservice_server.types.messages import StepTime


class StepWork(NamedTuple):
    """The planner's `StepBatch` in whole numbers."""

    num_seqs: int = 0
    context_tokens: int = 0
    prompt_tokens: int = 0
    prompt_chunks: int = 0
    attention_pairs: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_seqs + self.prompt_tokens


def step_work(plan: Plan) -> StepWork:
    """The last token of a prompt whose others were cached costs as much as one that decodes, and counts as one."""
    scheduled = plan.scheduled
    if plan.num_decodes == len(scheduled):  # the usual case, of hundreds of sequences: lists, because they are faster
        return StepWork(len(scheduled), len(scheduled) + sum([share.start for share in scheduled]))
    starts = [share.start for share in scheduled if share.num_tokens == 1]
    chunks = [(share.start, share.num_tokens) for share in scheduled if share.num_tokens > 1]
    return StepWork(
        num_seqs=len(starts),
        context_tokens=len(starts) + sum(starts),
        prompt_tokens=sum(num_tokens for _, num_tokens in chunks),
        prompt_chunks=len(chunks),
        attention_pairs=sum(attention_pairs(*chunk) for chunk in chunks),
    )


def step_batch(plan: Plan) -> StepBatch:
    """What the latency model takes."""
    return StepBatch(*step_work(plan))


class StepTimer:
    """Times the steps of one engine. Times are seconds of a monotonic clock.

    While there is work, steps follow each other without a gap, and a step's time is that between two results.
    Otherwise it begins with the step.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None  # when the last step had its result, if there has been work ever since
        self._ended: StepTime | None = None

    def pause(self) -> None:
        """No step is in flight, and none follows at once."""
        self._last_s = None

    def end(self, work: StepWork, began_s: float | None, now: float) -> None:
        """A step has its result; `began_s` is None where the device has computed something else meanwhile."""
        if began_s is not None:
            self._ended = StepTime(now - (began_s if self._last_s is None else self._last_s), *work)
        self._last_s = now

    def take(self) -> StepTime | None:
        """The step that has ended since the last call."""
        ended, self._ended = self._ended, None
        return ended
