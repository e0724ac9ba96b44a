"""What replaces the pods: a change of what the engine is told, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Engine, LLMServiceSpec
from llmservice_operator.children.deployment import expected_deployment
from llmservice_operator.models.source import Model
from llmservice_operator.sizing.sizing import Sized, size

BASE: dict[str, Any] = {
    "model": {"uri": "file:///tiny"},
    "resources": {"gpu": {"product": "l40s"}},
    "engine": {"maxModelLen": 8192, "maxNumSeqs": "auto"},
}
ENGINE_CHANGES: dict[str, dict[str, Any]] = {
    "maxModelLen": {"maxModelLen": 4096},
    "maxNumSeqs": {"maxNumSeqs": 3},
    "sizing.policy": {"sizing": {"policy": "expected", "expectedTokens": 1000}},
    "sizing.expectedTokens": {"sizing": {"policy": "expected", "expectedTokens": 2000}},
    "gpuMemoryUtilization": {"gpuMemoryUtilization": 0.8},
    "kvCacheDtype": {"kvCacheDtype": "float16"},
    "blockSize": {"blockSize": 32},
    "maxNumBatchedTokens": {"maxNumBatchedTokens": 512},
    "prefixCaching": {"prefixCaching": False},
    "swapSpaceGiB": {"swapSpaceGiB": 1},
}
ROLLS: list[dict[str, Any]] = [
    {"model": {"uri": "file:///tiny", "servedName": "other"}},
    {"model": {"uri": "file:///tiny", "dtype": "float16"}},
    {"resources": {"gpu": {"product": "a100-40gb"}}},
    {"resources": {"gpu": {"product": "l40s"}, "requests": {"cpu": "2"}}},
    {"drainTimeout": "2m"},
    {"lanes": {"default": "batch"}},
    {"scheduling": {"priorityClassName": "high"}},
    {"podTemplate": {"labels": {"team": "a"}}},
]
STAYS: list[dict[str, Any]] = [
    {"replicas": 5},
    {"autoscaling": {"maxReplicas": 4}},
    {"slo": {"ttftP99": "2s"}},
    {"rollout": {"maxSurge": 0, "maxUnavailable": 1}},
    {"monitoring": {"podMonitor": True}},
    {"networkPolicy": {"enabled": False}},
    {"networkPolicy": {"to": [{}]}},
]


@pytest.fixture
def llama(model: Model) -> Model:
    """Of a size that an L40S holds with little to spare, so that every figure matters."""
    shape = replace(
        model.shape,
        layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=8192,
        dtype="bfloat16",
    )
    return replace(model, shape=shape)


def template(model: Model, spec: dict[str, Any], **rest: Any) -> Any:
    metadata = {"name": "tiny", "namespace": "team-a", "uid": "u", **rest.pop("metadata", {})}
    service = LLMService.model_validate({"metadata": metadata, "spec": {**BASE, **spec}, **rest})
    answer = size(service.spec, model)
    assert isinstance(answer, Sized)
    return expected_deployment(service, answer, 1, "img:1")["spec"]["template"]


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every leaf of a model by its path in YAML."""
    for name, field in model.model_fields.items():
        path = prefix + (field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{path}.")
        else:
            yield path


def test_every_field_of_the_engine_is_in_the_table() -> None:
    assert set(fields(Engine)) == ENGINE_CHANGES.keys()


@pytest.mark.parametrize("field", ENGINE_CHANGES)
def test_a_change_of_any_engine_field_replaces_the_pods(field: str, llama: Model) -> None:
    """`sizing` speaks through maxNumSeqs: auto, so that with a fixed number it changes nothing."""
    before = {"engine": dict(BASE["engine"])}
    after = {"engine": {**BASE["engine"], **ENGINE_CHANGES[field]}}
    if field == "sizing.expectedTokens":
        before["engine"]["sizing"] = {"policy": "expected", "expectedTokens": 1000}

    assert template(llama, before) != template(llama, after)


@pytest.mark.parametrize("change", ROLLS, ids=str)
def test_what_pods_are_made_of_replaces_them(change: dict[str, Any], llama: Model) -> None:
    assert template(llama, change) != template(llama, {})


@pytest.mark.parametrize("change", STAYS, ids=str)
def test_what_pods_know_nothing_of_leaves_them(change: dict[str, Any], llama: Model) -> None:
    assert template(llama, change) == template(llama, {})


def test_the_tables_speak_of_every_part_of_the_spec() -> None:
    covered = {name for change in ROLLS + STAYS for name in change} | {"engine"}
    assert {field.alias or name for name, field in LLMServiceSpec.model_fields.items()} == covered


def test_labels_annotations_generation_and_status_of_the_service_leave_the_pods(llama: Model) -> None:
    metadata = {"labels": {"a": "b"}, "annotations": {"c": "d"}, "generation": 9, "resourceVersion": "7"}
    status = {"observedGeneration": 8, "replicas": 3, "readyReplicas": 2, "url": "http://x"}

    assert template(llama, {}, metadata=metadata, status=status) == template(llama, {})


def test_the_same_spec_gives_the_same_template_and_keeps_what_it_was_given(llama: Model) -> None:
    before = copy.deepcopy(BASE)

    assert template(llama, {}) == template(llama, {})
    assert before == BASE
