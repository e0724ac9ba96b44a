"""What a platform engineer types."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from harness.cluster import Cluster
from harness.kube import Kube
from harness.wait import wait_for

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-llama.yaml"
NAME = "tiny-llama"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        shutil.which("kubectl") is None, reason="needs kubectl on the PATH (https://kubernetes.io/docs/tasks/tools)"
    ),
]


def example(cluster: Cluster) -> str:
    return EXAMPLE.read_text().replace("file:///tiny-llama\n", f"{cluster.model_uri}\n")


@pytest.fixture(scope="module")
def applied(cluster: Cluster) -> str:
    """The example, applied and Ready; what `kubectl apply` said."""
    said = cluster.kubectl("apply", "-f", "-", stdin=example(cluster)).stdout
    cluster.kubectl("wait", "llm", NAME, "--for=condition=Ready", "--timeout=60s")
    return said


def test_apply_creates_and_applying_again_changes_nothing(cluster: Cluster, applied: str) -> None:
    assert applied == f"llmservice.serving.llmservice.io/{NAME} created\n"
    generation = ("get", "llm", NAME, "-o", "jsonpath={.metadata.generation}")
    before = cluster.kubectl(*generation).stdout
    cluster.kubectl("apply", "-f", "-", stdin=example(cluster))
    assert cluster.kubectl(*generation).stdout == before


def test_get_prints_the_columns_that_matter(cluster: Cluster, applied: str) -> None:
    header, row = cluster.kubectl("get", "llms").stdout.splitlines()
    assert header.split() == ["NAME", "MODEL", "READY", "REPLICAS", "DESIRED", "MAXSEQS", "TTFT-P99", "AGE"]
    assert row.split()[:3] == [NAME, cluster.model_uri, "True"]
    header, row = cluster.kubectl("get", "llms", "-o", "wide").stdout.splitlines()
    assert (header.split()[-1], row.split()[-1]) == ("REASON", "Serving")
    assert "deployment.apps/tiny-llama" in cluster.kubectl("get", "deployments,services,pods").stdout


def test_describe_shows_the_working_the_conditions_and_the_events(cluster: Cluster, applied: str) -> None:
    text = cluster.kubectl("describe", "llm", NAME).stdout
    for expected in ("kv per token", "SLOFeasible", "SizingValid", "Events:"):
        assert expected in text


def test_explain_teaches_the_fields(cluster: Cluster, applied: str) -> None:
    if not cluster.is_described:
        pytest.skip("this build of kube-apiserver serves an OpenAPI that kubectl can't read")
    assert "computes it from model and GPU" in cluster.kubectl("explain", "llmservice.spec.engine.maxNumSeqs").stdout


def test_llm_explain_tells_the_sizing_the_signals_and_the_pods(cluster: Cluster, applied: str) -> None:
    """kubectl finds the plugin on the PATH; a healthy service exits 0."""
    text = cluster.kubectl("llm", "explain", NAME).stdout
    predicted = ["predicted"] if cluster.is_local else []  # elsewhere the example's model is known by its pod alone
    for expected in ("OK  ", "sequences in a step", "threshold", *predicted, "Ready, ", "log: "):
        assert expected in text
    absent = cluster.kubectl("llm", "explain", "absent", check=False)
    assert absent.returncode == 2
    assert "there is no LLMService absent" in absent.stderr


def test_logs_are_the_servers(cluster: Cluster, applied: str) -> None:
    assert '"listening"' in cluster.kubectl("logs", f"deploy/{NAME}").stdout


def test_scale_works_where_replicas_rule(cluster: Cluster, kube: Kube, applied: str) -> None:
    kube.patch(NAME, {"spec": {"autoscaling": None, "replicas": 1}})
    cluster.kubectl("scale", "llm", NAME, "--replicas=2")
    wait_for(lambda: kube.get(NAME)["status"].get("readyReplicas") == 2, 60, lambda: kube.get(NAME)["status"])
    scale = cluster.kubectl(
        "get", "--raw", f"/apis/serving.llmservice.io/v1alpha1/namespaces/default/llmservices/{NAME}/scale"
    )
    assert f"app.kubernetes.io/instance={NAME}" in scale.stdout
    cluster.kubectl("scale", "llm", NAME, "--replicas=1")
    wait_for(lambda: kube.get(NAME)["status"].get("replicas") == 1, 60, lambda: kube.get(NAME)["status"])


def test_get_watch_follows_changes_and_delete_takes_everything(cluster: Cluster, kube: Kube, applied: str) -> None:
    command = ["kubectl", "--kubeconfig", str(cluster.kubeconfig), "get", "pods", "-w", "--output-watch-events"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert "EVENT" in watching.stdout.readline()
        cluster.kubectl("delete", "llm", NAME, "--wait=true")
        events = []
        for line in watching.stdout:
            events.append(line.split()[0])
            if events[-1] == "DELETED":
                break
        watching.terminate()
    assert events[0] == "ADDED"
    assert kube.deployment(NAME) is None
