"""Checkpoints that cannot be served: the condition Ready says why, in the server's own words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.cluster import Cluster
from harness.kube import Kube, tiny_service
from harness.wait import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WEIGHTS = "model.safetensors"
UP = "model.layers.0.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        read = load_file(folder / WEIGHTS)
        change(read)
        save_file(read, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def truncate(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def of_unknown_scheme(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "hqq"}}))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (tensors(lambda read: read.pop(UP)), f"among them {UP}"),
    "shape": (tensors(lambda read: read.update({UP: torch.zeros(3, 5)})), f"{UP} has the shape [3, 5]"),
    "truncated": (truncate, "fetch it again"),
    "pickled": (pickled, "safetensors"),
    "scheme": (of_unknown_scheme, "hqq"),
}


ALWAYS = ["missing", "scheme"]
"""One that the loader finds, and one that is found before. The others' sentences are in the loader's tests, too."""


@pytest.mark.parametrize(
    "what", [what if what in ALWAYS else pytest.param(what, marks=pytest.mark.soak) for what in DAMAGES]
)
def test_a_checkpoint_that_cannot_be_served_says_why_in_ready(cluster: Cluster, kube: Kube, what: str) -> None:
    if not cluster.is_local:
        pytest.skip("pods of this cluster do not see the checkpoints' folder")
    damage, problem = DAMAGES[what]
    name, folder = f"bad-{what}", cluster.state_dir / "models"
    shutil.copytree(folder / "tiny-llama", folder / name)
    damage(folder / name)
    kube.create(tiny_service(name, f"file:///{name}"))

    def told() -> bool:
        condition = kube.condition(name, "Ready")
        return condition.get("status") == "False" and problem in condition["message"]

    wait_for(told, 120, lambda: (kube.get(name)["status"], kube.pods(name)))
    kube.delete(name)
