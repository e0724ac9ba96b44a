from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.api.status import ModelStatus
from llmservice_operator.models.source import Figures, Model
from llmservice_operator.status.model_status import known_figures, model_status

SHAPE = {"layers": 2, "heads": 4, "kvHeads": 2, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}
SOURCE = ModelSource.model_validate({"uri": "hf://org/name", "revision": "v1"})


def _status(**fields: Any) -> ModelStatus:
    known = {"uri": "hf://org/name", "revision": "v1", "figuresFrom": "config", "shape": SHAPE}
    return ModelStatus.model_validate({**known, **fields})


def test_what_the_status_keeps_is_what_is_known_after_a_restart(model: Model) -> None:
    figures = Figures("config", model.shape, 4000)
    kept = Model(model.location, model.shape, figures_from="config", weights_file_bytes=4000)

    assert known_figures(model_status(SOURCE, kept, None), SOURCE) == figures


def test_that_only_a_pod_can_tell_is_knowledge_too() -> None:
    assert known_figures(_status(figuresFrom="pod", shape=None), SOURCE) == Figures("pod")


@pytest.mark.parametrize(
    "status",
    [
        None,
        _status(uri="hf://org/other"),
        _status(revision="v2"),
        _status(figuresFrom="spec"),
        _status(shape=None),
        _status(shape={"layers": "many"}),
        _status(shape={**SHAPE, "unheardOf": 1}),
    ],
)
def test_figures_of_another_model_or_broken_ones_are_none(status: ModelStatus | None) -> None:
    assert known_figures(status, SOURCE) is None
