from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmservice_operator.api.resource import LLMService
from llmservice_operator.models.source import Model
from llmservice_operator.sizing.sizing import Sized, SizingProblem, measure, size, sizing_status
from llmservice_planner.gpu import GPU

CPU = {"gpu": {"count": 0}, "requests": {"cpu": "1", "memory": "2Gi"}}


def test_auto_finds_how_many_sequences_fit(service_of: Any, model: Model) -> None:
    service: LLMService = service_of(engine={"maxModelLen": 1024})

    answer = size(service.spec, model)

    assert isinstance(answer, Sized)
    assert answer.plan.max_num_seqs > 8
    assert answer.plan.max_model_len == 1024


def test_the_users_own_number_is_taken(sized: Sized) -> None:
    assert (sized.plan.max_num_seqs, sized.plan.limited_by) == (8, "maxNumSeqs")


@pytest.mark.parametrize(
    ("memory_gib", "taken_gib", "note"),
    [(None, 79.10, None), (20, 20, "is taken, it is less than the 79.10 GiB"), (96, 79.10, "is not taken, it is more")],
)
def test_the_smaller_of_two_figures_for_a_cards_memory_is_taken_and_said(
    memory_gib: float | None, taken_gib: float, note: str | None, service_of: Any, model: Model
) -> None:
    gpu = {"product": "h100-80gb"} | ({"memoryGiB": memory_gib} if memory_gib else {})

    answer = size(service_of(resources={"gpu": gpu}, engine={}).spec, model)

    assert isinstance(answer, Sized)
    assert answer.device.memory_bytes == int(taken_gib * 2**30)
    first = sizing_status(answer, None).explanation.splitlines()[0]
    assert (note in first) if note else ("memoryGiB" not in first)


def test_a_card_with_less_memory_than_the_catalogue_is_believed(service_of: Any, model: Model) -> None:
    small = size(service_of(resources={"gpu": {"product": "h100-80gb", "memoryGiB": 20}}, engine={}).spec, model)
    large = size(service_of(resources={"gpu": {"product": "h100-80gb"}}, engine={}).spec, model)

    assert isinstance(small, Sized)
    assert isinstance(large, Sized)
    assert isinstance(small.device, GPU)
    assert small.plan.num_blocks < large.plan.num_blocks


@pytest.mark.parametrize(
    ("spec", "changes", "reason", "advice"),
    [
        pytest.param(
            {"resources": {"gpu": {"product": "h9000"}}}, {}, "UnknownGPU", "resources.gpu.product", id="unknown card"
        ),
        pytest.param(
            {"resources": {"gpu": {"product": "l4", "count": 2}}}, {}, "Unsupported", "set it to 1", id="several cards"
        ),
        pytest.param(
            {"resources": {"gpu": {"count": 0}, "requests": {"memory": "256Mi"}}},
            {},
            "DoesNotFit",
            "What would help",
            id="too little memory",
        ),
        pytest.param({}, {"architecture": "gemma2"}, "UnsupportedModel", "qwen3", id="a family that is not served"),
        pytest.param({}, {"quantization": "awq"}, "UnsupportedModel", "unquantised", id="a quantised checkpoint"),
        pytest.param(
            {"engine": {}, "resources": CPU},
            {"max_position_embeddings": None},
            "InvalidSizing",
            "max_model_len",
            id="no length",
        ),
    ],
)
def test_what_cannot_work_is_a_value_that_says_what_to_change(
    spec: dict[str, Any], changes: dict[str, Any], reason: str, advice: str, service_of: Any, model: Model
) -> None:
    answer = size(service_of(**spec).spec, replace(model, shape=replace(model.shape, **changes)))

    assert isinstance(answer, SizingProblem)
    assert answer.reason == reason
    assert advice in answer.message


def test_no_remedy_is_proposed_that_the_server_would_refuse(service_of: Any, model: Model) -> None:
    large = replace(
        model.shape, layers=80, hidden_size=8192, heads=64, kv_heads=64, head_dim=128, intermediate_size=28672
    )

    answer = size(service_of(resources={"gpu": {"product": "h100-80gb"}}, engine={}).spec, replace(model, shape=large))

    assert isinstance(answer, SizingProblem)
    assert "fp8" not in answer.message
    assert "--gpu-count" not in answer.message


def test_the_prediction_is_shown_beside_the_measurement(sized: Sized) -> None:
    assert sized.plan is not None
    usable = sized.plan.num_blocks - 1

    status = sizing_status(sized, measure(sized, round(usable / 1.25), 2**30))

    assert status is not None
    assert status.measured is not None
    assert status.measured.error_percent == pytest.approx(25, abs=0.1)
    assert status.measured.weights_gib == 1.0
    assert status.blocks == usable + 1
    assert "max_num_seqs" in status.explanation


def test_a_server_that_sized_itself_is_not_compared_with_a_prediction_it_never_saw(sized: Sized) -> None:
    """It may hold a tenth of the blocks, or ten times as many, and be in order."""
    model = replace(sized.model, figures_from="pod")

    measured = measure(replace(sized, model=model), 17, 2**30)

    assert (measured.blocks, measured.error_percent) == (17, None)
