"""A service on a GPU whose rates are known, so that the capacity of a replica is predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llmservice_operator.api.resource import LLMService
from llmservice_operator.locations import Model, ModelLocation
from llmservice_operator.scaling.capacity import ReplicaModel
from llmservice_operator.scaling.demand import Demand
from llmservice_operator.sizing import Sized, size
from llmservice_planner.model.shape import ModelShape

L4 = {"gpu": {"product": "l4"}}
REQUEST = Demand(1, 1000, 200)
"""A mean request: 1000 prompt and 200 output tokens."""


@pytest.fixture
def llama_8b() -> Model:
    shape = ModelShape(
        layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    return Model(ModelLocation("hf", "/models/llama"), shape)


@pytest.fixture
def gpu_service(service_of: Callable[..., LLMService]) -> Callable[..., LLMService]:
    def build(**spec: Any) -> LLMService:
        return service_of(**{"resources": L4, "engine": {}, "slo": {"ttftP99": "2s"}, **spec})

    return build


@pytest.fixture
def gpu_sized(gpu_service: Callable[..., LLMService], llama_8b: Model) -> Sized:
    answer = size(gpu_service().spec, llama_8b)
    assert isinstance(answer, Sized)
    return answer


@pytest.fixture
def replica(gpu_service: Callable[..., LLMService], gpu_sized: Sized) -> ReplicaModel:
    model = ReplicaModel.of(gpu_sized, gpu_service().spec.slo)
    assert model is not None
    return model
