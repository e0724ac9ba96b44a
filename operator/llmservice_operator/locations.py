"""Where a model is, for the pods, and what is known of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import quote, urlsplit

from llmservice_operator.api.model_spec import ModelSource
from llmservice_planner.model.shape import ModelShape

MODELS_MOUNT = PurePosixPath("/models")
"""Where a pod mounts the volume that holds its checkpoint."""

_HF = re.compile(r"^hf://(?P<repository>[A-Za-z0-9._-]+/[A-Za-z0-9._-]+)(@(?P<revision>[A-Za-z0-9._/-]+))?$")
_PVC = re.compile(r"^pvc://(?P<claim>[a-z0-9]([-a-z0-9.]*[a-z0-9])?)(/(?P<path>[\w./ @:+=,-]*))?$", re.ASCII)
_S3 = re.compile(r"^s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(/(?P<path>[\w./ @:+=,-]*))?$", re.ASCII)
_OCI = re.compile(
    r"^oci://(?P<image>[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[a-z0-9._-]+)+(:[A-Za-z0-9._-]{1,128})?(@sha256:[0-9a-f]{64})?)"
    r"(#(?P<path>[A-Za-z0-9._/-]+))?$"
)


class ModelSourceError(Exception):
    """The model can't be served. `reason` is the condition's; a retry may help unless it is `lasting`."""

    def __init__(self, reason: str, message: str, *, lasting: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """Where a pod finds the checkpoint."""

    kind: Literal["file", "hf", "pvc", "s3", "oci"]
    path: str
    """Folder inside the pod."""
    fetch_uri: str | None = None
    """What the init container downloads (hf, s3)."""
    repository: str = ""
    revision: str = "main"
    hf_endpoint: str | None = None
    """The hub that the model, and adapters, are downloaded from (hf), unless that is the default."""
    claim: str | None = None
    """The PersistentVolumeClaim that is mounted (pvc)."""
    image: str | None = None
    """The image that is mounted as a volume (oci)."""


def locate(source: ModelSource, file_root: Path | None, hf_endpoint: str | None = None) -> ModelLocation:
    """Where a pod finds the model; raises ModelSourceError for an invalid source."""
    return replace(_location(source, file_root), hf_endpoint=hf_endpoint)


def _location(source: ModelSource, file_root: Path | None) -> ModelLocation:
    uri = source.uri
    if not uri.isprintable():
        raise ModelSourceError("InvalidURI", "model.uri holds control characters: correct it")
    match uri.partition("://")[0]:
        case "file":
            return _file_location(uri, file_root)
        case "hf":
            return _hf_location(source)
        case "pvc":
            return _pvc_location(uri)
        case "s3":
            return _s3_location(source)
        case "oci":
            return _oci_location(uri)
        case scheme:
            raise ModelSourceError(
                "InvalidURI", f"{scheme}:// is not known: use hf://, s3://, pvc://, oci:// or file:// in model.uri"
            )


def _file_location(uri: str, root: Path | None) -> ModelLocation:
    if root is None:
        raise ModelSourceError(
            "FileModelsDisabled",
            "file:// is off: set the chart's operator.fileModelsRoot to a folder that every node has, or use hf:// or"
            " pvc://",
        )
    base = root.resolve()
    folder = (base / uri.removeprefix("file:///")).resolve()
    if not folder.is_relative_to(base) or folder == base:
        raise ModelSourceError(
            "InvalidURI", f"{uri} leaves the folder of file:// models ({base}): give a path below it"
        )
    return ModelLocation("file", str(folder))


def _hf_location(source: ModelSource) -> ModelLocation:
    uri = source.uri
    match = _HF.fullmatch(uri)
    revision = source.revision or (match["revision"] if match else None) or "main"
    if match is None or ".." in uri or ".." in revision:
        raise ModelSourceError("InvalidURI", f"{uri} is not hf://org/name or hf://org/name@revision: correct model.uri")
    repository = match["repository"]
    name = repository.rpartition("/")[2]
    if source.cache is not None:
        name = f"hf/{repository}@{quote(revision, safe='')}"
    fetch_uri = uri if source.revision is None else f"hf://{repository}@{revision}"
    path = f"{MODELS_MOUNT}/{name}"
    return ModelLocation("hf", path, fetch_uri=fetch_uri, repository=repository, revision=revision)


def _s3_location(source: ModelSource) -> ModelLocation:
    match, folder = _matched(_S3, source.uri, "s3://bucket/path")
    name = folder.name or match["bucket"]
    if source.cache is not None:
        endpoint = source.s3.endpoint if source.s3 else None
        store = urlsplit(endpoint).netloc if endpoint else "aws"
        name = f"s3/{quote(store, safe='')}/{match['bucket']}/{folder}".removesuffix("/.")
    return ModelLocation("s3", f"{MODELS_MOUNT}/{name}", fetch_uri=source.uri)


def _pvc_location(uri: str) -> ModelLocation:
    match, path = _matched(_PVC, uri, "pvc://claim/path")
    return ModelLocation("pvc", str(MODELS_MOUNT / path), claim=match["claim"])


def _oci_location(uri: str) -> ModelLocation:
    match, path = _matched(_OCI, uri, "oci://registry/image[:tag][#path]")
    return ModelLocation("oci", str(MODELS_MOUNT / path), image=match["image"])


def _matched(pattern: re.Pattern[str], uri: str, expected: str) -> tuple[re.Match[str], PurePosixPath]:
    """The match and its path, which stays below the volume's root; raises ModelSourceError."""
    match = pattern.fullmatch(uri)
    path = PurePosixPath((match["path"] or "") if match else "")
    if match is None or ".." in path.parts or path.is_absolute():
        raise ModelSourceError("InvalidURI", f"{uri} is not {expected}: correct model.uri")
    return match, path


FiguresFrom = Literal["spec", "config", "pod"]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a model. Once known they are kept until `spec.model` names another one.

    `source` also decides who sizes: the operator with spec and config, the server with pod.
    """

    source: FiguresFrom
    shape: ModelShape | None = None
    """None: no pod has reported it yet."""
    weights_file_bytes: int | None = None
    """Size of the safetensors files, where it could be read."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model's location, and the figures that sizing needs."""

    location: ModelLocation
    shape: ModelShape | None
    """None: only the server can read it."""
    weights_bytes: int | None = None
    """Loaded size where the files could be read; None: counted from the shape."""
    figures_from: FiguresFrom = "config"
    weights_file_bytes: int | None = None

    @property
    def figures(self) -> Figures:
        return Figures(self.figures_from, self.shape, self.weights_file_bytes)
