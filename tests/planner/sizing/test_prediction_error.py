from typing import Any

import pytest

from llmservice_planner.sizing.latency import LatencyModel, StepBatch
from llmservice_planner.sizing.prediction_error import (
    ENOUGH_STEPS,
    MeasurementError,
    Prediction,
    StepGroup,
    read_steps,
    step_predictions,
)

MODEL = LatencyModel(step_s=1e-3, sequence_s=1e-5, weights_s=5e-3, token_s=1e-5, kv_token_s=1e-8, pair_s=1e-9)


def reported(kind: str = "decode", steps: int = 200, seconds: float = 2.0, **sums: float) -> dict[str, Any]:
    names = ("num_seqs", "context_tokens", "prompt_tokens", "prompt_chunks", "attention_pairs")
    return {"kind": kind, "sequences": 8, "steps": steps, "seconds": seconds, **dict.fromkeys(names, 0), **sums}


@pytest.mark.parametrize(("predicted", "measured", "error"), [(120, 100, 0.2), (75, 100, -0.25), (5, 5, 0)])
def test_the_error_is_positive_where_too_much_was_predicted(predicted: float, measured: float, error: float) -> None:
    assert Prediction("blocks", predicted, measured, "blocks").error_ratio == pytest.approx(error)


def test_steps_are_read_as_the_mean_of_what_a_step_computed() -> None:
    groups = read_steps({"steps": [reported(num_seqs=1600, context_tokens=160_000), reported(steps=0)]})
    assert groups == [StepGroup("decode", 200, 2.0, StepBatch(8, 800))]
    assert read_steps({}) == []


@pytest.mark.parametrize(
    "steps", [3, [{"kind": "decode"}], ["decode"], [reported() | {"seconds": "long"}], [reported() | {"steps": 1e999}]]
)
def test_what_is_no_report_of_a_server_is_refused(steps: Any) -> None:
    with pytest.raises(MeasurementError, match="not those of llmservice serve"):
        read_steps({"steps": steps})


def test_a_server_as_fast_as_the_model_has_no_error_and_a_slower_one_has() -> None:
    decode, prompts = StepBatch(8, 800), StepBatch(2, 100, 512, 1, 131_328)
    exact = [
        StepGroup("decode", 200, 200 * MODEL.seconds(decode), decode),
        StepGroup("mixed", 100, 100 * MODEL.seconds(prompts), prompts),
    ]
    assert [each.quantity for each in step_predictions(MODEL, exact)] == ["itl", "ttft"]
    assert all(abs(each.error_ratio) < 1e-9 for each in step_predictions(MODEL, exact))
    slower = [StepGroup(each.kind, each.steps, 2 * each.seconds, each.batch) for each in exact]
    assert all(each.error_ratio == pytest.approx(-0.5) for each in step_predictions(MODEL, slower))


def test_a_few_steps_are_not_compared() -> None:
    few = [StepGroup("decode", ENOUGH_STEPS - 1, 9.0, StepBatch(1, 10))]
    assert step_predictions(MODEL, few) == []
    assert len(step_predictions(MODEL, [*few, *few])) == 1
