"""Where the planner gets a model's figures from: a folder, or a URI that another installed package can read.

The planner does no network I/O. A package that does registers a reader for a scheme in the entry-point group
`llmservice.model_readers`: a function of the URI that returns `CheckpointFigures` and raises `ShapeError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from llmservice_planner.model.checkpoint import StoredTensor
from llmservice_planner.model.config import patched
from llmservice_planner.model.shape import ModelShape, ShapeError, weights_bytes

GROUP = "llmservice.model_readers"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_IN_CLUSTER = {"pvc": "a volume of the cluster", "oci": "an image, which nodes mount"}


@dataclass(frozen=True, slots=True)
class CheckpointFigures:
    """What is read of a checkpoint that is not on this machine."""

    config: Mapping[str, Any]
    """Its config.json."""
    weights_bytes: int | None
    """Of its safetensors files, as they are stored."""
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Of its files' headers, which are read where config.json does not say how large the weights are."""


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """A model for a plan."""

    shape: ModelShape
    uri: str | None = None
    """As `spec.model.uri` names it; None: of dimensions alone."""
    folder: Path | None = None
    stored_bytes: int | None = None
    """Of the weights of a model without a folder."""
    overrides: Mapping[str, Any] | None = None
    """Of its config.json."""

    def weights_bytes(self, dtype: str) -> int | None:
        """In memory as `dtype`, of a checkpoint that is not quantised; None: to be counted from the shape."""
        if self.folder is not None:
            return weights_bytes(self.folder, dtype)
        return self.stored_bytes if dtype == self.shape.dtype else None


def read_model(text: str, overrides: Mapping[str, Any] | None = None) -> ModelFigures:
    """Of a folder, a URI of `spec.model.uri`, or `org/name` on the Hugging Face hub. Raises `ShapeError`.

    overrides: of its config.json, as `patched` takes them.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        if _REPOSITORY.fullmatch(text) and not Path(text).exists():
            return _read_remote("hf", f"hf://{text}", overrides)
        return _read_folder(Path(text), overrides)
    if scheme == "file":
        if not rest.startswith("/"):
            raise ShapeError(f"{text} is not absolute, expected file:///path")
        return _read_folder(Path(rest), overrides)
    if scheme in _IN_CLUSTER:
        raise ShapeError(
            f"{text} is {_IN_CLUSTER[scheme]}, which can't be read from here: give a copy of its config.json in a "
            "folder, or the dimensions in place of --model (plan: --shape; a manifest: spec.model.shape)"
        )
    return _read_remote(scheme, text, overrides)


def _read_folder(folder: Path, overrides: Mapping[str, Any] | None) -> ModelFigures:
    shape = ModelShape.from_folder(folder, overrides)
    return ModelFigures(shape, f"file://{folder.absolute()}", folder, overrides=overrides)


def _read_remote(scheme: str, uri: str, overrides: Mapping[str, Any] | None) -> ModelFigures:
    readers = {entry.name: entry for entry in entry_points(group=GROUP)}
    if scheme not in readers:
        known = ", ".join(f"{name}://" for name in ("file", *sorted(readers)))
        raise ShapeError(f"{uri} is of no kind that can be read here, expected a folder, org/name, or {known}")
    try:
        read: Callable[[str], CheckpointFigures] = readers[scheme].load()
        figures = read(uri)
    except ModuleNotFoundError as error:
        raise ShapeError(f"{uri} needs {error.name} to be read: pip install 'llmservice[fetch]'") from error
    config = patched(figures.config, overrides)
    shape = ModelShape.from_config(config).counted(config, figures.tensors)
    return ModelFigures(shape, uri, stored_bytes=figures.weights_bytes, overrides=overrides)
