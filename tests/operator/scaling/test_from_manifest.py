from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from llmservice_operator.scaling.from_manifest import ManifestError, sized_service
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.model.source import ModelFigures

SHAPE = {"layers": 2, "heads": 4, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512, "dtype": "float32"}
MANIFEST: dict[str, Any] = {
    "apiVersion": "serving.llmservice.io/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"uri": "pvc://models/chat", "shape": SHAPE},
        "engine": {"maxModelLen": 1024, "maxNumSeqs": 16},
        "slo": {"ttftP99": "2s"},
        "autoscaling": {"minReplicas": 2, "maxReplicas": 6},
    },
}


def manifest(**spec: Any) -> dict[str, Any]:
    return {**MANIFEST, "spec": {**MANIFEST["spec"], **spec}}


def test_a_manifest_is_sized_and_has_the_policy_that_the_operator_would_scale_by() -> None:
    service = sized_service(MANIFEST)

    assert (service.name, service.replicas, service.slo.ttft_p99_s) == ("chat", 2, 2.0)
    assert service.policy is not None
    assert (service.policy.max_replicas, service.policy.max_num_seqs) == (6, service.plan.max_num_seqs)
    assert service.request.shape.vocab_size == 512


def test_without_autoscaling_the_replicas_are_fixed() -> None:
    service = sized_service(manifest(autoscaling=None, replicas=3))

    assert (service.policy, service.replicas) == (None, 3)


@pytest.mark.parametrize(("dtype", "weights_bytes"), [("auto", 2**20), ("float32", 2**20), ("bfloat16", None)])
def test_figures_that_the_caller_has_read_replace_those_of_the_spec(dtype: str, weights_bytes: int | None) -> None:
    """The stored size is that of the weights in memory unless the manifest converts them."""
    figures = ModelFigures(ModelShape.from_fields({**SHAPE, "layers": 4}), stored_bytes=2**20)

    service = sized_service(manifest(model={"uri": "hf://org/name", "dtype": dtype}), figures)

    assert (service.request.shape.layers, service.request.weights_bytes) == (4, weights_bytes)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"spec": {}}, "spec.model: Field required"),
        ({"kind": "Deployment"}, "kind is 'Deployment', expected LLMService"),
        (manifest(model={"uri": "hf://org/name"}), "set spec.model.shape"),
        (manifest(autoscaling={"minReplicas": 7, "maxReplicas": 6}), "minReplicas must not be above maxReplicas"),
        (manifest(model={"uri": "pvc://a", "shape": {**SHAPE, "kvHeads": 3}}), "spec.model.shape: heads 4"),
        (manifest(engine={"maxModelLen": 16_000_000}), "DoesNotFit: the model does not fit"),
    ],
)
def test_a_manifest_that_cannot_be_simulated_is_refused_with_what_to_change(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ManifestError, match=message):
        sized_service({**MANIFEST, **changed})


def test_the_autoscaler_runs_without_kubernetes_and_http_libraries() -> None:
    """In a process in which they can't be imported."""
    script = """
import importlib, pkgutil, sys
for name in ("torch", "kopf", "kubernetes", "aiohttp", "prometheus_client"):
    sys.modules[name] = None
import llmservice_operator.scaling as scaling
for one in pkgutil.iter_modules(scaling.__path__):
    print(importlib.import_module(f"{scaling.__name__}.{one.name}").__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "llmservice_operator.scaling.from_manifest" in done.stdout
