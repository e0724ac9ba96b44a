"""The cluster under test: `llmservice up` as a user would start it, or the one that KUBECONFIG names.

Environment:
    KUBECONFIG                      test that cluster (operator and gateway from the chart) instead of a local one
    LLMSERVICE_E2E_GATEWAY_URL      its gateway, as seen from here (default http://127.0.0.1:8080, a port-forward)
    LLMSERVICE_E2E_MODEL_URI        a tiny checkpoint that its pods can reach (default pvc://llmservice-e2e/tiny-llama)
    KUBEBUILDER_ASSETS              a directory with etcd and kube-apiserver for the local cluster's API
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.release import assert_nothing_was_forbidden, write_release
from harness.wait import wait_for

LLMSERVICE = str(Path(sys.executable).with_name("llmservice"))


@dataclass
class Cluster:
    """`models` is the directory behind file:///; `processes` names what must be gone at the end (local only)."""

    kubeconfig: Path
    gateway_url: str
    model_uri: str
    state_dir: Path
    process: subprocess.Popen[str] | None = None
    output: list[str] = field(default_factory=list)
    prometheus_url: str = ""

    @property
    def is_local(self) -> bool:
        return self.process is not None

    @cached_property
    def is_described(self) -> bool:
        """Whether kubectl finds LLMServices in the API's OpenAPI, as it must to validate or explain.

        A kube-apiserver built with Go's second JSON package serves a document that kubectl can't use.
        """
        document = self._kubectl("get", "--raw", "/openapi/v3/apis/serving.llmservice.io/v1alpha1").stdout
        operations = [found for path in json.loads(document)["paths"].values() for found in path.values()]
        return any("x-kubernetes-group-version-kind" in found for found in operations if isinstance(found, dict))

    def kubectl(
        self, *arguments: str, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        if arguments[0] in {"apply", "replace"} and not self.is_described:
            arguments = (*arguments, "--validate=false")
        result = self._kubectl(*arguments, stdin=stdin)
        assert not check or result.returncode == 0, f"kubectl {arguments}: {result.stderr}{result.stdout}"
        return result

    def _kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        plugins = os.pathsep.join((str(Path(LLMSERVICE).parent), os.environ["PATH"]))
        return subprocess.run(
            ["kubectl", *arguments], env={**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": plugins},
            input=stdin, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip

    def server_processes(self) -> list[int]:
        """The pids of every `llmservice serve` of this cluster, found in /proc by its model's path."""
        return [pid for pid, command in processes() if " serve " in command and str(self.state_dir) in command]


def processes() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended while we looked
                continue


@contextmanager
def running_cluster(state_dir: Path, *flags: str, values: Mapping[str, Any] | None = None) -> Iterator[Cluster]:
    """A cluster for the tests in one file; its log is printed where the test fails.

    A local one runs operator and gateway under the chart's own roles, as rendered with `values`. A request that these
    roles refused fails the tests, when they are over.
    """
    if "KUBECONFIG" in os.environ:
        yield Cluster(
            Path(os.environ["KUBECONFIG"]),
            os.environ.get("LLMSERVICE_E2E_GATEWAY_URL", "http://127.0.0.1:8080"),
            os.environ.get("LLMSERVICE_E2E_MODEL_URI", "pvc://llmservice-e2e/tiny-llama"),
            state_dir,
        )
        return
    models = state_dir / "models"
    subprocess.run(
        [LLMSERVICE, "make-tiny-model", str(models / "tiny-llama")], check=True, timeout=60, capture_output=True
    )
    state = state_dir / "state"
    release = write_release(state_dir / "release.yaml", values or {})
    arguments = ["--models-root", str(models), "--state-dir", str(state), "--release", str(release), *flags]
    process = subprocess.Popen(
        [LLMSERVICE, "up", *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    output: list[str] = []
    reader = threading.Thread(target=_collect, args=(process, output), daemon=True)
    reader.start()
    try:
        kubeconfig = wait_for(lambda: _find(output, r"export KUBECONFIG=(\S+)"), 60, lambda: "".join(output))
        gateway = wait_for(lambda: _find(output, r"gateway\S*\s.*?(http://[\w.:]+)"), 60, lambda: "".join(output))
        prometheus = _find(output, r"prometheus\s+(http://[\w.:]+)") or ""
        cluster = Cluster(Path(kubeconfig), gateway, "file:///tiny-llama", state_dir, process, output, prometheus)
        yield cluster
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
        reader.join(timeout=10)
        print("".join(output)[-20_000:])
    assert_nothing_was_forbidden(state, "llmservice-operator", "llmservice-gateway")


def _collect(process: subprocess.Popen[str], output: list[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        output.extend(lines)


def _find(output: list[str], pattern: str) -> str | None:
    found = re.search(pattern, "".join(output))
    return found[1] if found else None
