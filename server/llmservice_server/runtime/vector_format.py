"""From the states of a text's tokens to its vector, as sentence-transformers' files of a checkpoint say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from safetensors import SafetensorError
from safetensors.torch import load_file

from llmservice_server.engine.config import Pooling
from llmservice_server.types.checkpoint_config import read_json_object
from llmservice_server.types.errors import ModelLoadError, first_line

_MODULES = {"Transformer", "Pooling", "Dense", "Normalize"}
"""Of sentence-transformers; others change the vectors."""
_ACTIVATIONS = {"Identity": torch.nn.Identity(), "Tanh": torch.nn.Tanh()}
"""Of its dense layers."""
_POOLINGS: Mapping[str, Pooling] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
}
_POOLING_FOLDER = "1_Pooling"
"""Unless modules.json names another."""
_VECTOR = "sentence_embedding"
"""sentence-transformers' name of what the modules after the pooling read and write."""


def pool(states: torch.Tensor, lengths: Sequence[int], pooling: Pooling) -> torch.Tensor:
    """`states`: `[num_inputs, longest, size]`; float32 `[num_inputs, size]`, the padding left out.

    As in sentence-transformers: the state of the first token (`cls`) or of the last one, or the mean of all.
    """
    counts = torch.tensor(lengths, device=states.device)
    if pooling == "cls":
        return states[:, 0].float()
    if pooling == "last":
        return states[torch.arange(len(lengths), device=states.device), counts - 1].float()
    real = torch.arange(states.shape[1], device=states.device) < counts[:, None]
    return torch.where(real[..., None], states.float(), 0.0).sum(dim=1) / counts[:, None]


class Normalize(torch.nn.Module):
    """Makes vectors of length 1."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return F.normalize(vectors, dim=-1)


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """How an embedding is made from the states of its tokens."""

    pooling: Pooling
    modules: torch.nn.Sequential
    """What the pooled states go through, in float32."""
    size: int
    """Numbers in a vector: the first ones of what the modules give."""

    def vectors(self, states: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Float32 `[num_inputs, size]`; `states` and `lengths` as of `pool`."""
        vectors: torch.Tensor = self.modules(pool(states, lengths, self.pooling))
        return vectors[:, : self.size]

    @classmethod
    def plain(cls, size: int, pooling: Pooling = "last") -> VectorFormat:
        """Of a checkpoint without files of sentence-transformers: vectors have length 1."""
        return cls(pooling, torch.nn.Sequential(Normalize()), size)

    @classmethod
    def of(cls, folder: Path, wanted: Pooling, size: int, default: Pooling = "mean") -> VectorFormat:
        """As sentence-transformers' files of the checkpoint say; `default` is the pooling where there are none.

        size: numbers in a state.

        Raises `ModelLoadError` for modules and poolings that are not computed here.
        """
        entries = _modules(folder)
        kinds = [kind for kind, _ in entries]
        if not entries or "LogitScore" in kinds:  # the latter scores by the probability of a token
            pooling = _checkpoint_pooling(folder / _POOLING_FOLDER) if wanted == "auto" else wanted
            return cls.plain(size, pooling or default)
        if unknown := sorted(set(kinds) - _MODULES):
            raise ModelLoadError(
                f"modules.json names {', '.join(unknown)}, expected only {', '.join(sorted(_MODULES))}: "
                "the server does not compute the others, choose another checkpoint"
            )
        if "Pooling" not in kinds and wanted == "auto":
            raise ModelLoadError(
                "modules.json names no Pooling, as where a model has a vector for each token, which is not served: "
                "choose one vector of a text with --pooling, or another checkpoint"
            )
        before = kinds[: kinds.index("Pooling")] if "Pooling" in kinds else []
        if of_tokens := sorted(set(before) - {"Transformer"}):
            raise ModelLoadError(
                f"modules.json names {', '.join(of_tokens)} before Pooling, where it changes the state of each token: "
                "the server does not compute that, choose another checkpoint"
            )
        pooling_folder = folder / (dict(entries).get("Pooling") or _POOLING_FOLDER)
        pooling = _checkpoint_pooling(pooling_folder, is_required=True) if wanted == "auto" else wanted
        modules = torch.nn.Sequential()
        for kind, path in entries:
            if kind == "Dense":
                layer, activation = _dense(folder / path, size)
                modules.extend((layer, activation))
                size = layer.out_features
            elif kind == "Normalize":
                modules.append(Normalize())
        return cls(pooling or default, modules, min(size, _truncate_dim(folder) or size))


def _checkpoint_pooling(folder: Path, is_required: bool = False) -> Pooling | None:
    """That of the config.json in the pooling's folder, which not every checkpoint has. Raises `ModelLoadError`."""
    path = folder / "config.json"
    if not path.exists():
        if is_required:
            raise ModelLoadError(
                f"modules.json names a Pooling, but {path} is missing: fetch it again, or set --pooling"
            )
        return None
    settings = read_json_object(path)
    modes = [key.removeprefix("pooling_mode_") for key, value in settings.items() if value is True and "_mode_" in key]
    named = settings.get("pooling_mode", "mean")
    modes = modes or [str(mode) for mode in (named if isinstance(named, list) else [named])]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ModelLoadError(
            f"{path}: the pooling is {' and '.join(modes)}, expected cls, mean or lasttoken alone: "
            "choose one with --pooling, or another checkpoint"
        )
    pooling = _POOLINGS[modes[0]]
    if settings.get("include_prompt") is False and pooling != "last":
        raise ModelLoadError(
            f"{path}: include_prompt is false, which leaves the tokens of a prompt out, and the server does not know a "
            "text's prompt: choose a pooling of all tokens with --pooling, or another checkpoint"
        )
    return pooling


def _truncate_dim(folder: Path) -> int | None:
    """The numbers of a vector that sentence-transformers keeps (Matryoshka); None: all. Raises `ModelLoadError`."""
    path = folder / "config_sentence_transformers.json"
    kept = read_json_object(path).get("truncate_dim") if path.exists() else None
    if kept is not None and (isinstance(kept, bool) or not isinstance(kept, int) or kept < 1):
        raise ModelLoadError(f"{path}: truncate_dim is {kept!r}, expected a positive whole number")
    return kept


def _dense(folder: Path, size: int) -> tuple[torch.nn.Linear, torch.nn.Module]:
    """A dense layer of sentence-transformers for `size` numbers, and its activation. Raises `ModelLoadError`."""
    settings, weights = read_json_object(folder / "config.json"), folder / "model.safetensors"
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelLoadError(
            f"{folder}: activation_function is {name}, expected {' or '.join(_ACTIVATIONS)}: choose another checkpoint"
        )
    _refuse_other_dense(folder, settings)
    try:
        tensors = {key.removeprefix("linear."): tensor.float() for key, tensor in load_file(weights).items()}
        layer = torch.nn.Linear(size, len(tensors["weight"]), "bias" in tensors)
        layer.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise ModelLoadError(
            f"{weights} is no dense layer for {size} numbers ({first_line(error)}): delete it and fetch it again"
        ) from error
    return layer.requires_grad_(requires_grad=False), _ACTIVATIONS[name]


def _refuse_other_dense(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse what sentence-transformers 5 and later know besides a layer of the vector."""
    expected = {"use_residual": False, "module_input_name": _VECTOR, "module_output_name": _VECTOR}
    for key, value in expected.items():
        if (given := settings.get(key)) not in (None, value):
            raise ModelLoadError(f"{folder}: {key} is {given!r}, expected {value!r}: choose another checkpoint")


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The kind of each, with its whole name where it is none of sentence-transformers' own, and its folder."""
    path = folder / "modules.json"
    if not path.exists():
        return []
    try:
        return [
            (re.sub(r"^sentence_transformers\.(.*\.)?", "", str(module["type"])), str(module.get("path", "")))
            for module in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelLoadError(
            f"{path} is no list of sentence-transformers' modules ({error}): delete it and fetch it again"
        ) from error
