from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.api.status import ModelStatus
from llmservice_operator.locations import Figures, Model
from llmservice_operator.sizing import Sized, SizingReport
from llmservice_operator.status.model_status import (
    known_figures,
    measured_status,
    model_status,
    remembered_report,
    sizing_status,
)

MIB = 2**20
SHAPE = {"layers": 2, "heads": 4, "kvHeads": 2, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}
SOURCE = ModelSource.model_validate({"uri": "hf://org/name", "revision": "v1"})


def _status(**fields: Any) -> ModelStatus:
    known = {"uri": "hf://org/name", "revision": "v1", "figuresFrom": "config", "shape": SHAPE}
    return ModelStatus.model_validate({**known, **fields})


def test_the_figures_in_the_status_are_known_after_a_restart(model: Model) -> None:
    figures = Figures("config", model.shape, 4000)
    kept = Model(model.location, model.shape, figures_from="config", weights_file_bytes=4000)

    assert known_figures(model_status(SOURCE, kept, None, None), SOURCE) == figures


def test_it_is_remembered_that_only_a_pod_can_read_the_model() -> None:
    assert known_figures(_status(figuresFrom="pod", shape=None), SOURCE) == Figures("pod")


@pytest.mark.parametrize(
    "status",
    [
        None,
        _status(uri="hf://org/other"),
        _status(revision="v2"),
        _status(configOverrides='{"rope_scaling": null}'),
        _status(figuresFrom="spec"),
        _status(shape=None),
        _status(shape={"layers": "many"}),
        _status(shape={**SHAPE, "unheardOf": 1}),
    ],
)
def test_figures_of_another_model_or_invalid_ones_are_ignored(status: ModelStatus | None) -> None:
    assert known_figures(status, SOURCE) is None


def test_the_measurement_is_shown_beside_the_prediction(sized: Sized) -> None:
    assert sized.plan is not None
    usable = sized.plan.num_blocks - 1

    status = sizing_status(sized, measured_status(sized, round(usable / 1.25), 2**30))

    assert status is not None
    assert status.measured is not None
    assert status.measured.error_percent == pytest.approx(25, abs=0.1)
    assert status.measured.weights_gib == 1.0
    assert status.blocks == usable + 1
    assert "max_num_seqs" in status.explanation


def test_a_server_that_sized_itself_has_no_prediction_error(sized: Sized) -> None:
    """It may hold a tenth of the blocks, or ten times as many, and be in order."""
    model = replace(sized.model, figures_from="pod")

    measured = measured_status(replace(sized, model=model), 17, 2**30)

    assert (measured.blocks, measured.error_percent) == (17, None)


def test_a_model_that_the_planner_does_not_know_is_shown_by_its_server_s_report(sized: Sized) -> None:
    report = SizingReport(7, 256, 16, 1023, 512 * MIB, 1024 * 16 * 4096, 256 * MIB, None)
    model = replace(sized.model, figures_from="pod", shape=None)

    status = sizing_status(replace(sized, model=model, plan=None, report=report), None)

    assert status is not None
    assert (status.source, status.limited_by) == ("pod", "server")
    assert (status.max_num_seqs, status.max_model_len, status.blocks) == (7, 256, 1024)
    assert status.guaranteed_sequences == status.expected_sequences > 0  # no request is longer than 256 tokens
    assert (status.weights_gib, status.overhead_gib, status.kv_pool_gib) == (0.5, 0.25, 0.06)
    assert status.kv_bytes_per_token == 4096


def test_blocks_of_groups_of_layers_are_remembered(sized: Sized) -> None:
    """Each of 1023 blocks holds 16 tokens of a half of the layers, of 4096 bytes each."""
    report = SizingReport(7, 256, 16, 1023, 512 * MIB, 1024 * 16 * 4096, 256 * MIB, None, block_groups=2)
    model = replace(sized.model, figures_from="pod", shape=None)

    status = sizing_status(replace(sized, model=model, plan=None, report=report), None)

    assert status is not None
    assert (status.kv_bytes_per_token, status.guaranteed_sequences) == (8192, 1023 // 32)
    assert remembered_report(status, Figures("pod"), 16) == report
