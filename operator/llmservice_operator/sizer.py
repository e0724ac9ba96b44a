"""Sizing with a memory: a model's figures are not fetched anew in every pass, a failure is tried again soon."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from llmservice_operator.model_source import Model, ModelSourceError
from llmservice_operator.sizing import Sized, SizingProblem, size
from llmservice_operator.spec import LLMServiceSpec, ModelSource

_KEEP_S = 600.0
"""A checkpoint seldom changes under its name; a changed spec is looked at anew at once."""
_RETRY_S = 15.0

ReadModel = Callable[[ModelSource], Coroutine[Any, Any, Model]]


@dataclass(frozen=True, slots=True)
class _Known:
    spec: str
    answer: Sized | SizingProblem
    until_s: float


class Sizer:
    """Sizes one service."""

    def __init__(self, read_model: ReadModel) -> None:
        self._read_model = read_model
        self._known: _Known | None = None

    async def size(self, spec: LLMServiceSpec, now: float) -> Sized | SizingProblem:
        """What the planner says of `spec`; a model that can't be read for the moment keeps what was known of it."""
        text = spec.model_dump_json(include={"model", "resources", "engine", "slo"})
        known = self._known if self._known and self._known.spec == text else None
        if known and now < known.until_s:
            return known.answer
        answer, lasting = await self._ask(spec)
        if not lasting and known and isinstance(known.answer, Sized):
            answer = known.answer
        keep_s = _KEEP_S if isinstance(answer, Sized) and lasting else _RETRY_S
        self._known = _Known(text, answer, now + keep_s)
        return answer

    async def _ask(self, spec: LLMServiceSpec) -> tuple[Sized | SizingProblem, bool]:
        try:
            model = await self._read_model(spec.model)
        except ModelSourceError as error:
            return SizingProblem(error.reason, str(error)), error.lasting
        return size(spec, model), True
