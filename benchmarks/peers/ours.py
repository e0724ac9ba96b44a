"""This project's engine with default settings, in the caller's process."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from llmservice_server import LLM
from llmservice_server.backend.quantized import QuantizedWeight
from peers.workload import EngineServer, Job, SteppedPeer


class OurEngine(EngineServer):
    def __init__(self, job: Job, **settings: Any) -> None:
        llm = LLM(
            job.model,
            dtype=job.dtype,
            max_num_seqs=job.in_flight,
            max_model_len=job.longest,
            expected_tokens=job.longest,
            threads=job.threads,
            **settings,
        )
        super().__init__(llm.engine)

    def close(self) -> None:
        del self._engine


def peer(job: Job) -> SteppedPeer:
    return SteppedPeer(OurEngine(job), job)


def int8_peer(job: Job) -> SteppedPeer:
    return SteppedPeer(OurEngine(job, quantization="int8"), job)


def int4_peer(job: Job) -> SteppedPeer:
    """Of a checkpoint in W4A16, as it is stored."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        _write_int4(job.model, folder)
        return SteppedPeer(OurEngine(replace(job, model=folder)), job)


_GROUP = 128


def _write_int4(source: Path, folder: Path) -> None:
    """The checkpoint with its matrices in symmetric groups of 4 bits, and its head in 8, in compressed-tensors' format.

    As Q4_K_M, which has 4.85 bits a number in most matrices and 6.56 in the head, and rounds activations to 8 bits.
    """
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight, module = tensors.pop(name), name.removesuffix(".weight")
        groups = weight.float().view(len(weight), -1, _GROUP)
        scales = groups.abs().amax(-1, keepdim=True) / 7
        eights = ((groups / scales).round() + 8).to(torch.int32).view(len(weight), -1, 8)
        tensors[f"{module}.weight_packed"] = (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)
        tensors[f"{module}.weight_scale"] = scales.squeeze(-1).to(weight.dtype)
        tensors[f"{module}.weight_shape"] = torch.tensor(weight.shape)
    head = QuantizedWeight.int8(tensors.pop("lm_head.weight"))
    tensors |= {"lm_head.weight": head.values, "lm_head.weight_scale": head.scales.to(torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    of_4_bits = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
    of_8_bits = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    rounded = {**of_8_bits, "strategy": "token", "dynamic": True}
    schemes = [
        {"targets": ["lm_head"], "weights": of_8_bits, "input_activations": rounded, "format": "int-quantized"},
        {"targets": ["Linear"], "weights": of_4_bits, "input_activations": None, "format": "pack-quantized"},
    ]
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {f"group_{number}": scheme for number, scheme in enumerate(schemes)},
        "ignore": [],
    }
    (folder / "config.json").write_text(json.dumps(config))


def peer_by_transformers(job: Job) -> SteppedPeer:
    return SteppedPeer(OurEngine(job, implementation="transformers"), job)
