"""From the version before to this one, with a service running: CRD, gateway and operator are replaced in turn, as
`helm upgrade` and a rolling Deployment do it, and no request fails.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from harness.cluster import LLMSERVICE, Cluster
from harness.kube import Kube, tiny_service
from harness.traffic import traffic
from harness.wait import wait_for
from llmservice_local.loopback import free_port

ROOT = Path(__file__).parents[1]
PREVIOUS = "f72ee64ad2a0405642d542ed1ca68727aa9ffebf"
PACKAGES = ("planner", "server", "operator", "gateway", "local")
CRD = "crds/llmservices.serving.llmservice.io.yaml"
NAME = "upgraded"
SCALE = f"/apis/serving.llmservice.io/v1alpha1/namespaces/default/llmservices/{NAME}/scale"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif("KUBECONFIG" in os.environ, reason="replaces the operator, which is not ours to do elsewhere"),
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl on the PATH"),
]


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the version before, out of this repository's history."""
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", PREVIOUS, *PACKAGES, "crds", "pyproject.toml"],
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    if packed.returncode:
        pytest.skip(f"the history does not reach back to {PREVIOUS[:7]}: {packed.stderr.decode()[:100]}")
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    commands = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]["llmservice.commands"]
    installed = folder / PACKAGES[0] / "llmservice-0.dist-info"  # found before this version's
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: llmservice\nVersion: 0\n")
    entries = "\n".join(f"{name} = {target}" for name, target in commands.items())
    (installed / "entry_points.txt").write_text(f"[llmservice.commands]\n{entries}\n")
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, previous: Path) -> Iterator[Cluster]:
    """API server, controllers and node with the earlier CRD; operator and gateway are started by the test."""
    folder = tmp_path_factory.mktemp("upgrade")
    models = folder / "models"
    subprocess.run([LLMSERVICE, "make-tiny-model", str(models / "tiny-llama")], check=True, timeout=60)
    flags = ["--no-operator", "--no-gateway", "--models-root", str(models), "--state-dir", str(folder / "state")]
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen([LLMSERVICE, "up", *flags], stdout=log, stderr=log, text=True)
    try:
        kubeconfig = folder / "state" / "kubeconfig"
        wait_for(lambda: "Ctrl-C" in (folder / "up.log").read_text(), 60, (folder / "up.log").read_text)
        running = Cluster(kubeconfig, "", "file:///tiny-llama", folder, process)
        running.kubectl("replace", "-f", str(previous / CRD))
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=40)


@contextmanager
def component(cluster: Cluster, code: Path | None, command: str, *flags: str, health: str = "health") -> Iterator[str]:
    """`llmservice COMMAND` of this version, or of the code in a folder; ends by SIGTERM, as a pod does."""
    port = free_port()
    paths = os.pathsep.join(str(code / name) for name in PACKAGES) if code else ""
    log = cluster.state_dir / f"{command}-{'previous' if code else 'present'}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "llmservice_planner", command, "--host", "127.0.0.1", "--port", str(port), *flags],
            env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PYTHONPATH": paths},
            stdout=output, stderr=output,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: answers(f"{url}/{health}"), 60, log.read_text)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)
        print(log.read_text()[-5000:])


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - an address of ours
            return True
    except OSError:
        return False


def test_no_request_fails_while_everything_is_upgraded(cluster: Cluster, previous: Path) -> None:
    kube, operator = Kube(cluster), ("--file-models-root", str(cluster.state_dir / "models"))
    before, after = ExitStack(), ExitStack()
    with before, after:
        gateway = before.enter_context(component(cluster, previous, "gateway"))
        leaving = before.enter_context(ExitStack())
        leaving.enter_context(component(cluster, previous, "operator", *operator, health="metrics"))
        kube.create(tiny_service(NAME, cluster.model_uri))
        kube.wait_condition(NAME, "Ready", "True", timeout_s=90)
        assert "replicas" not in kube.get(NAME)["spec"]
        pods = {pod["metadata"]["name"] for pod in kube.pods(NAME)}

        with traffic(gateway, NAME, 2.0, 8) as old:
            wait_for(lambda: len(old.records) > 4, 30)
            cluster.kubectl("replace", "-f", str(ROOT / CRD))
            arriving = after.enter_context(component(cluster, None, "gateway", "--metrics-port", "0"))
            with traffic(arriving, NAME, 2.0, 8) as new:
                wait_for(lambda: len(new.records) > 4, 30)
                old.stop.set()
                wait_for(lambda: not old.in_flight, 60)
                leaving.close()
                probed = ("--health-port", str(free_port()))
                after.enter_context(component(cluster, None, "operator", *operator, *probed, health="metrics"))

                def replaced() -> bool:
                    """The pods are of the present version's template, and the earlier ones are gone."""
                    return not pods & {pod["metadata"]["name"] for pod in kube.pods(NAME)}

                wait_for(replaced, 120, lambda: (kube.get(NAME).get("status"), kube.pods(NAME)))
                kube.wait_condition(NAME, "Ready", "True", timeout_s=60)
                count = len(new.records)
                wait_for(lambda: len(new.records) > count + 4, 30)

        assert (old.failures, new.failures) == ([], [])
        assert len(old.records) + len(new.records) > 20
        assert json.loads(cluster.kubectl("get", "--raw", SCALE).stdout)["spec"]["replicas"] == 1
        cluster.kubectl("delete", "llm", NAME, "--wait=true")
        wait_for(lambda: not kube.pods(NAME), 60, lambda: kube.pods(NAME))
