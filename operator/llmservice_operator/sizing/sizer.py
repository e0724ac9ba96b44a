"""Sizing with a memory: a model's figures are not fetched anew in every pass, a failure is tried again soon."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.api.spec import LLMServiceSpec
from llmservice_operator.models.location import ModelSourceError
from llmservice_operator.models.source import Figures, Model
from llmservice_operator.sizing.sizing import Sized, SizingProblem, size
from llmservice_operator.sizing.sizing_report import SizingReport

_KEEP_S = 600.0
"""A checkpoint seldom changes under its name; a changed spec is looked at anew at once."""
_RETRY_S = 15.0

ReadModel = Callable[[ModelSource, Figures | None], Coroutine[Any, Any, Model]]


@dataclass(frozen=True, slots=True)
class _Question:
    """What is sized. The answer to another question is no answer to this."""

    spec: str
    known: Figures | None
    report: SizingReport | None


@dataclass(frozen=True, slots=True)
class _Known:
    question: _Question
    answer: Sized | SizingProblem
    until_s: float


class Sizer:
    """Sizes one service."""

    def __init__(self, read_model: ReadModel) -> None:
        self._read_model = read_model
        self._known: _Known | None = None

    async def size(
        self, spec: LLMServiceSpec, now: float, known: Figures | None = None, report: SizingReport | None = None
    ) -> Sized | SizingProblem:
        """What the planner says of `spec`; a model that can't be read for the moment keeps what was known of it.

        `known` are the figures that the status kept, `report` is of a server that sized itself.
        """
        text = spec.model_dump_json(include={"model", "resources", "engine", "slo"})
        question = _Question(text, known, report)
        before = self._known if self._known and self._known.question == question else None
        if before and now < before.until_s:
            return before.answer
        answer, lasting = await self._ask(spec, known, report)
        if not lasting and before and isinstance(before.answer, Sized):
            answer = before.answer
        keep_s = _KEEP_S if isinstance(answer, Sized) and lasting else _RETRY_S
        self._known = _Known(question, answer, now + keep_s)
        return answer

    async def _ask(
        self, spec: LLMServiceSpec, known: Figures | None, report: SizingReport | None
    ) -> tuple[Sized | SizingProblem, bool]:
        try:
            model = await self._read_model(spec.model, known)
        except ModelSourceError as error:
            return SizingProblem(error.reason, str(error)), error.lasting
        if model.figures_from == "pod" and report is not None and report.shape is not None:
            model = replace(model, shape=report.shape)
        return size(spec, model, report), True
