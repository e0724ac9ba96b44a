"""What kubectl says at once of a spec that can't be served, and that nothing depends on it: without the webhook the
conditions say the same.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest
import yaml

from harness.cluster import Cluster, processes
from harness.kube import Kube, Object, tiny_service
from harness.wait import wait_for

SHAPE = {"layers": 80, "heads": 64, "kvHeads": 8, "hiddenSize": 8192, "intermediateSize": 28672, "vocabSize": 128256}
TOO_LARGE: Object = {
    "model": {"uri": "hf://org/name", "shape": SHAPE, "dtype": "bfloat16"},
    "resources": {"gpu": {"product": "l4"}},
    "engine": {"maxModelLen": 8192},
}
TOO_SLOW: Object = {
    "model": {"uri": "hf://org/name", "shape": {**SHAPE, "layers": 16, "hiddenSize": 4096, "heads": 32}},
    "resources": {"gpu": {"product": "l4"}},
    "engine": {"maxModelLen": 512},
    "slo": {"itlP99": "1ms"},
    "replicas": 1,
}

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif("KUBECONFIG" in os.environ, reason="stops the operator, which is not ours to do elsewhere"),
]


@pytest.fixture(scope="module", autouse=True)
def webhook(cluster: Cluster) -> None:
    wait_for(lambda: bundle(cluster), 30)


def bundle(cluster: Cluster) -> str:
    """What the API server trusts, once the operator has made its certificate."""
    found = cluster.kubectl("get", "validatingwebhookconfigurations", "-o", "json").stdout
    (configuration,) = json.loads(found)["items"]
    trusted: str = configuration["webhooks"][0]["clientConfig"].get("caBundle", "")
    return trusted


def manifest(name: str, spec: Object) -> str:
    metadata = {"name": name, "namespace": "default"}
    body = {"apiVersion": "serving.llmservice.io/v1alpha1", "kind": "LLMService", "metadata": metadata, "spec": spec}
    return yaml.safe_dump(body)


def apply(cluster: Cluster, text: str, *flags: str) -> Any:
    return cluster.kubectl("apply", "-f", "-", *flags, check=False, stdin=text)


def applied_and_denied(cluster: Cluster, name: str, spec: Object, *flags: str) -> str:
    """kubectl's words; an API server takes up a new webhook's configuration within a second or so."""

    def denied() -> str:
        answer = apply(cluster, manifest(name, spec), *flags)
        if answer.returncode == 0:
            cluster.kubectl("delete", "llmservice", name, "--ignore-not-found")
        return answer.stderr if answer.returncode else ""

    found: str = wait_for(denied, 20)
    return found


def test_a_model_that_does_not_fit_is_denied_in_the_words_of_the_condition(cluster: Cluster) -> None:
    said = applied_and_denied(cluster, "large", TOO_LARGE)

    assert 'admission webhook "llmservices.serving.llmservice.io" denied the request' in said
    assert "SizingValid would be False: DoesNotFit: the model does not fit:" in said
    assert "What would help: (1)" in said
    assert "NotFound" in cluster.kubectl("get", "llmservice", "large", check=False).stderr


def test_a_dry_run_is_answered_as_well(cluster: Cluster) -> None:
    assert "DoesNotFit" in applied_and_denied(cluster, "large", TOO_LARGE, "--dry-run=server")


def test_a_latency_that_the_card_can_not_keep_is_warned_about_and_stored(cluster: Cluster, kube: Kube) -> None:
    answer = apply(cluster, manifest("slow", TOO_SLOW))

    assert answer.returncode == 0, answer.stderr
    assert "Warning: SLOFeasible will be False: ITLUnreachable:" in answer.stderr
    kube.wait_condition("slow", "SLOFeasible", "False", timeout_s=30)
    assert kube.condition("slow", "SLOFeasible")["reason"] == "ITLUnreachable"
    kube.delete("slow")


def test_a_name_that_is_taken_is_denied(cluster: Cluster) -> None:
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken"}, "spec": {"ports": [{"port": 80}]}}
    cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(theirs))

    said = applied_and_denied(cluster, "taken", tiny_service("taken", cluster.model_uri)["spec"])

    assert "Ready would be False: NameConflict: a Service called taken is there already" in said
    cluster.kubectl("delete", "service", "taken")


def test_a_change_that_does_not_fit_is_denied_and_one_beside_the_spec_never_is(cluster: Cluster, kube: Kube) -> None:
    kube.create(tiny_service("small", cluster.model_uri, replicas=1))
    patch = ["patch", "llmservice", "small", "--type=merge", "-p"]

    refused = cluster.kubectl(*patch, json.dumps({"spec": {"engine": {"maxModelLen": 9_000_000}}}), check=False)
    assert "SizingValid would be False" in refused.stderr
    cluster.kubectl("label", "llmservice", "small", "team=ml")
    cluster.kubectl("scale", "llmservice", "small", "--replicas=2")

    assert kube.get("small")["spec"]["replicas"] == 2
    kube.delete("small")


def test_while_no_operator_answers_an_apply_works_and_a_pass_says_the_same(cluster: Cluster, kube: Kube) -> None:
    denied = applied_and_denied(cluster, "large", TOO_LARGE)
    (operator,) = [
        pid
        for pid, command in processes()
        if " operator " in command and str(cluster.state_dir) in command and "shim" not in command
    ]
    os.kill(operator, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        answer = apply(cluster, manifest("large", TOO_LARGE))
        assert answer.returncode == 0, answer.stderr
        assert time.monotonic() - began_s < 15, "the API server waits for 5 s"
    finally:
        os.kill(operator, signal.SIGCONT)

    kube.wait_condition("large", "SizingValid", "False", timeout_s=60)
    condition = kube.condition("large", "SizingValid")
    assert f"{condition['reason']}: {condition['message']}" in denied
    kube.delete("large")
