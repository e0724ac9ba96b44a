"""The command against an API server; kubectl's plugin is the same command."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.kubectl_plugin import run as plugin
from llmservice_planner.command import main

SERVICES = "/apis/serving.llmservice.io/v1alpha1/namespaces/team-a/llmservices"


def condition(kind: str, status: str, reason: str, message: str) -> dict[str, Any]:
    stamp = {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
    return {"type": kind, "status": status, "reason": reason, "message": message, **stamp}


@pytest.fixture
async def service(kube: KubeClient, manifest_of: Any) -> KubeClient:
    await kube.request("POST", SERVICES, body=manifest_of(), content_type="application/json")
    return kube


async def set_conditions(kube: KubeClient, *conditions: dict[str, Any]) -> None:
    await kube.patch_status("team-a", "tiny", {"observedGeneration": 1, "conditions": list(conditions)})


async def explain(*arguments: str) -> int:
    """The command as a user runs it, in a thread of its own: it brings its own event loop."""
    return await asyncio.to_thread(main, ["explain", *arguments])


def with_namespace(kubeconfig: Path, namespace: str) -> str:
    """Give the kubeconfig's context a namespace; returns the context's name."""
    config = yaml.safe_load(kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = namespace
    kubeconfig.write_text(yaml.safe_dump(config))
    return str(config["contexts"][0]["name"])


async def test_a_healthy_service_is_one_line_and_exits_zero(service: KubeClient, capsys: Any) -> None:
    await set_conditions(service, condition("Ready", "True", "Serving", "1 of 1 replicas are ready"))

    assert await explain("tiny", "-n", "team-a") == 0
    assert "OK  1 of 1 replicas are ready" in capsys.readouterr().out


async def test_a_problem_has_a_remedy_and_exits_one(service: KubeClient, capsys: Any) -> None:
    await set_conditions(
        service, condition("Ready", "False", "OOMKilled", "the server container was killed for memory")
    )

    assert await explain("tiny", "-n", "team-a") == 1
    assert "-> Raise spec.resources.limits.memory" in capsys.readouterr().out


async def test_machines_get_json(service: KubeClient, capsys: Any) -> None:
    assert await explain("tiny", "-n", "team-a", "-o", "json") == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["reason"] == "NotReconciled"


async def test_a_plot_of_nothing_is_refused(service: KubeClient, tmp_path: Path, capsys: Any) -> None:
    assert await explain("tiny", "-n", "team-a", "--plot", str(tmp_path / "hour.svg")) == 2
    assert "there is nothing to plot yet" in capsys.readouterr().err


async def test_a_service_that_is_not_there_exits_two(kube: KubeClient, capsys: Any) -> None:
    assert await explain("absent", "-n", "team-a") == 2
    assert "there is no LLMService absent in namespace team-a" in capsys.readouterr().err


async def test_the_namespace_is_the_contexts_own(service: KubeClient, kubeconfig: Path, capsys: Any) -> None:
    context = with_namespace(kubeconfig, "team-a")

    assert await explain("tiny", "--context", context) == 1
    assert "tiny in team-a" in capsys.readouterr().out


async def test_an_unknown_context_is_reported(kubeconfig: Path, capsys: Any) -> None:
    assert await explain("tiny", "--context", "nowhere") == 2
    assert "no way to the API server" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"\xff\xfe", b"a", None], ids=["YAML", "list", "UTF-8", "text", "folder"]
)
def test_an_unusable_kubeconfig_is_one_sentence(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.mkdir() if content is None else kubeconfig.write_bytes(content)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    assert main(["explain", "tiny"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"no way to the API server: the kubeconfig {kubeconfig} cannot be used, correct it (" in line


async def test_kubectl_finds_the_same_command(
    service: KubeClient, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl-llm", "explain", "tiny", "-n", "team-a"])

    assert await asyncio.to_thread(plugin) == 1
    assert "tiny in team-a" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["operator"], 2), (["--help"], 0)])
def test_the_plugin_prints_its_usage(
    arguments: list[str], status: int, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl-llm", *arguments])

    assert plugin() == status
    assert "kubectl llm explain NAME" in capsys.readouterr().err
