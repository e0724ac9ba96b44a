from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmservice_operator.api import labels
from llmservice_operator.api.resource import LLMService
from llmservice_operator.correction import as_given, corrected, given_of, max_num_seqs_now, record_of
from llmservice_operator.locations import Model
from llmservice_operator.sizing import Given, Sized, size

ENGINE = {"maxModelLen": 512, "maxNumSeqs": "auto"}
ON_GPU = {"resources": {"gpu": {"product": "l4"}}, "engine": ENGINE}
MEASURED = 1000
"""Usable blocks: far fewer than were predicted."""


def sized_of(service: LLMService, model: Model) -> Sized:
    shape = replace(
        model.shape, layers=32, hidden_size=4096, intermediate_size=14336, heads=32, head_dim=128, dtype="bfloat16"
    )
    answer = size(service.spec, replace(model, shape=shape))
    assert isinstance(answer, Sized)
    return answer


def recorded(service: LLMService, sized: Sized) -> Given | None:
    record = record_of(service.spec, sized)
    return None if record is None else given_of({"metadata": {"annotations": {labels.SIZING: record}}})


@pytest.fixture
def before(service_of: Any, model: Model) -> Given:
    """What the pods were given that measured."""
    service = service_of(**ON_GPU)
    given = recorded(service, sized_of(service, model))
    assert given is not None
    return given


@pytest.mark.parametrize(
    ("change", "blocks", "is_corrected"),
    [
        ({}, MEASURED, True),
        ({"podTemplate": {"image": "img:2"}}, MEASURED, True),
        ({"drainTimeout": "5s"}, MEASURED, True),
        ({"engine": ENGINE | {"sizing": {"expectedTokens": 100}}}, MEASURED, True),
        ({}, None, False),
        ({}, 3, False),  # too few for one request: no server runs with them
        ({"engine": ENGINE | {"maxNumSeqs": 200}}, MEASURED, False),
        # What was measured says nothing about these.
        ({"model": {"uri": "file:///other"}}, MEASURED, False),
        ({"model": {"uri": "file:///tiny", "quantization": "int8"}}, MEASURED, False),
        ({"resources": {"gpu": {"product": "l40s"}}}, MEASURED, False),
        ({"resources": {"gpu": {"product": "l4", "memoryGiB": 20}}}, MEASURED, False),
        ({"engine": ENGINE | {"maxModelLen": 256}}, MEASURED, False),
        ({"engine": ENGINE | {"gpuMemoryUtilization": 0.95}}, MEASURED, False),
        ({"engine": ENGINE | {"kvCacheDtype": "float32"}}, MEASURED, False),
        ({"engine": ENGINE | {"blockSize": 32}}, MEASURED, False),
        ({"engine": ENGINE | {"maxNumBatchedTokens": 1024}}, MEASURED, False),
        ({"engine": ENGINE | {"maxLoras": 2}}, MEASURED, False),
        ({"podTemplate": {"extraArgs": ["--eager"]}}, MEASURED, False),
    ],
)
def test_new_pods_get_the_number_from_measured_blocks_where_those_hold_for_them(
    before: Given, change: Any, blocks: int | None, is_corrected: bool, service_of: Any, model: Model
) -> None:
    service = service_of(**ON_GPU | change)
    predicted = sized_of(service, model)
    found = corrected(service.spec, predicted, before, blocks)
    if not is_corrected:
        assert found == predicted
        return
    assert found.plan is not None
    assert predicted.max_num_seqs is not None
    assert found.max_num_seqs == found.plan.max_num_seqs
    assert 0 < found.plan.max_num_seqs < predicted.max_num_seqs
    assert found.plan.limited_by == "kvMemory"
    assert found.plan.explanation[-1] == (
        f"measured: max_num_seqs {found.max_num_seqs} in place of {predicted.max_num_seqs}, limited by kvMemory, as"
        " pods measured 1,000 KV blocks"
    )


def test_pods_keep_their_number_until_they_are_replaced(before: Given, service_of: Any, model: Model) -> None:
    service = service_of(**ON_GPU)
    predicted = sized_of(service, model)
    found = corrected(service.spec, predicted, before, MEASURED)
    given = recorded(service, found)
    assert as_given(service.spec, predicted, given) == found
    assert as_given(service.spec, predicted, before) == predicted
    assert as_given(service.spec, predicted, None) == predicted


def test_blocks_that_hardly_change_the_number_do_not_change_it_again(
    before: Given, service_of: Any, model: Model
) -> None:
    service = service_of(**ON_GPU)
    predicted = sized_of(service, model)
    found = corrected(service.spec, predicted, before, MEASURED)
    given = recorded(service, found)
    for blocks in (MEASURED * 98 // 100, MEASURED, MEASURED * 102 // 100):
        assert corrected(service.spec, predicted, given, blocks) == found
        assert max_num_seqs_now(service.spec, found, blocks) == (found.max_num_seqs, "kvMemory")
    other = corrected(service.spec, predicted, given, MEASURED * 2)
    assert other.max_num_seqs is not None
    assert found.max_num_seqs is not None
    assert other.max_num_seqs > found.max_num_seqs
    assert max_num_seqs_now(service.spec, found, MEASURED * 2) == (other.max_num_seqs, "kvMemory")


def test_blocks_as_predicted_bring_the_predicted_number_back(before: Given, service_of: Any, model: Model) -> None:
    service = service_of(**ON_GPU)
    predicted = sized_of(service, model)
    assert predicted.plan is not None
    given = recorded(service, corrected(service.spec, predicted, before, MEASURED))
    assert corrected(service.spec, predicted, given, predicted.plan.num_blocks - 1) == predicted


def test_a_number_that_the_user_sets_replaces_a_corrected_one(before: Given, service_of: Any, model: Model) -> None:
    service = service_of(**ON_GPU)
    predicted = sized_of(service, model)
    given = recorded(service, corrected(service.spec, predicted, before, MEASURED))
    fixed = service_of(**ON_GPU | {"engine": ENGINE | {"maxNumSeqs": predicted.max_num_seqs}})
    answer = sized_of(fixed, model)
    assert as_given(fixed.spec, answer, given) == answer
    assert corrected(fixed.spec, answer, given, MEASURED).max_num_seqs == predicted.max_num_seqs


def test_a_model_without_a_cache_is_never_corrected(service_of: Any, encoder: Model) -> None:
    service = service_of(**ON_GPU)
    answer = size(service.spec, encoder)
    assert isinstance(answer, Sized)
    assert record_of(service.spec, answer) is None
    assert max_num_seqs_now(service.spec, answer, MEASURED) is None


@pytest.mark.parametrize(
    "record",
    [
        "",
        "[",
        "[]",
        "{}",
        '{"max_num_seqs": "8", "limited_by": "cap", "predicted": 8, "settings": "a"}',
        '{"max_num_seqs": 0, "limited_by": "cap", "predicted": 8, "settings": "a"}',
        '{"max_num_seqs": 8, "limited_by": "luck", "predicted": 8, "settings": "a"}',
        '{"max_num_seqs": 8, "limited_by": "cap", "predicted": 8, "settings": "a", "blocks": -1}',
    ],
)
def test_a_record_that_is_not_ours_counts_as_none(record: str) -> None:
    assert given_of({"metadata": {"annotations": {labels.SIZING: record}}}) is None
