from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmservice_operator.api import labels
from llmservice_operator.api.status import PredictionStatus
from llmservice_operator.locations import Model
from llmservice_operator.scaling.load import Load, PodLoad
from llmservice_operator.sizing import Sized, size
from llmservice_operator.status.prediction_status import measured_blocks, predictions, predictions_status
from llmservice_planner.sizing.latency import StepBatch
from llmservice_planner.sizing.prediction_error import Prediction, StepGroup

ON_GPU = {"resources": {"gpu": {"product": "l4"}}, "engine": {"maxModelLen": 512, "maxNumSeqs": "auto"}}


def load(kv_blocks: int | None) -> Load:
    return Load("pods", (PodLoad("a", 0, 0, 0.0),), kv_blocks=kv_blocks)


@pytest.fixture
def on_gpu(service_of: Any, model: Model) -> Sized:
    shape = replace(
        model.shape, layers=32, hidden_size=4096, intermediate_size=14336, heads=32, head_dim=128, dtype="bfloat16"
    )
    answer = size(service_of(**ON_GPU).spec, replace(model, shape=shape))
    assert isinstance(answer, Sized)
    return answer


def test_each_figure_that_is_known_is_compared(on_gpu: Sized) -> None:
    assert on_gpu.plan is not None
    assert on_gpu.latency is not None
    batch = StepBatch(8, 8000)
    steps = [StepGroup("decode", 500, 500 * 1.25 * on_gpu.latency.seconds(batch), batch)]
    found = predictions(on_gpu, load((on_gpu.plan.num_blocks - 1) * 2), steps, (60.0, 120.0))
    errors = {each.quantity: each.error_ratio for each in found}
    assert errors == pytest.approx({"blocks": -0.5, "itl": -0.2, "startup": -0.5}, abs=1e-3)


def test_what_is_not_known_is_not_compared(sized: Sized, on_gpu: Sized) -> None:
    assert predictions(on_gpu, None, [], None) == []
    assert predictions(on_gpu, load(None), [], None) == []
    steps = [StepGroup("decode", 500, 5.0, StepBatch(8, 8000))]
    assert predictions(sized, None, steps, None) == []  # the rates of a CPU are not known


def itl(predicted: float, measured: float) -> Prediction:
    return Prediction("itl", predicted, measured, "seconds")


def test_a_small_change_of_an_error_is_not_written() -> None:
    before = predictions_status([itl(0.01, 0.0125)], [])
    assert before == [
        PredictionStatus(quantity="itl", predicted=0.01, measured=0.0125, unit="seconds", error_percent=-20.0)
    ]
    assert predictions_status([itl(0.0101, 0.0125)], before) == before
    assert predictions_status([], before) == before  # pods could not be read
    assert predictions_status([itl(0.02, 0.0125)], before)[0].error_percent == 60.0


@pytest.mark.parametrize(
    ("templates", "reported", "expected"),
    [
        (["new"], 900, 900),
        (["new", "new"], 900, 900),
        (["new", "old"], 900, None),  # the old pod may have had other settings
        ([None], 900, None),
        (["new"], None, None),
    ],
)
def test_blocks_count_only_where_all_pods_that_serve_have_the_present_template(
    templates: list[str | None], reported: int | None, expected: int | None, pod_named: Any
) -> None:
    deployment = {"spec": {"template": {"metadata": {"annotations": {labels.TEMPLATE: "new"}}}}}
    starting = pod_named("starting", ready=False, template="other")
    pods = [*(pod_named(str(number), template=template) for number, template in enumerate(templates)), starting]
    assert measured_blocks(load(reported), pods, deployment) == expected
    assert measured_blocks(None, pods, deployment) is None
