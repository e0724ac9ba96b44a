"""Where a model is, for the pods, and its figures: from the spec, its config.json, or later a pod."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import aiohttp

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.http_body import read_bounded
from llmservice_planner.shape import DTYPE_BYTES, ModelShape, ShapeError, weights_bytes

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
    """The hub that it is downloaded from, unless that is the default."""
    claim: str | None = None
    """The PersistentVolumeClaim that is mounted (pvc)."""
    image: str | None = None
    """The image that is mounted as a volume (oci)."""


def locate(source: ModelSource, file_root: Path | None, hf_endpoint: str | None = None) -> ModelLocation:
    """Where a pod finds the model; raises ModelSourceError for an invalid source."""
    uri = source.uri
    if not uri.isprintable():
        raise ModelSourceError("InvalidURI", "model.uri holds control characters: correct it")
    match uri.partition("://")[0]:
        case "file":
            return _file_location(uri, file_root)
        case "hf":
            return _hf_location(source, hf_endpoint)
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


def _hf_location(source: ModelSource, endpoint: str | None) -> ModelLocation:
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
    return ModelLocation(
        "hf", path, fetch_uri=fetch_uri, repository=repository, revision=revision, hf_endpoint=endpoint
    )


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


DEFAULT_HUB = "https://huggingface.co"

_FETCH_TIMEOUT_S = 10.0
_ANSWER_LIMIT_BYTES = 4 * 2**20

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


class ModelReader:
    """Reads a model's figures from the spec, a local folder, or the hub; never with a user's Secret."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        file_root: Path | None,
        hf_endpoint: str,
        hf_token: str | None,
        timeout_s: float = _FETCH_TIMEOUT_S,
    ) -> None:
        self._session = session
        self._file_root = file_root
        self._sees_files = file_root is not None and file_root.is_dir()
        """In a cluster the nodes have the folder, the operator's container does not."""
        self._hf_endpoint = hf_endpoint.rstrip("/")
        self._hf_token = hf_token
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def read(self, source: ModelSource, known: Figures | None = None) -> Model:
        """The model's location and figures, with `known` ones instead of a request; raises ModelSourceError."""
        mirror = self._hf_endpoint if self._hf_endpoint != DEFAULT_HUB else None
        location = locate(source, self._file_root, mirror)
        try:
            if location.kind == "file" and self._sees_files:
                dtype = None if source.dtype == "auto" else source.dtype
                return await asyncio.to_thread(_read_folder, location, dtype)
            if source.shape is not None:
                shape = ModelShape.from_fields(source.shape.model_dump(by_alias=True))
                return Model(location, shape, figures_from="spec")
            if known is None:
                known = await self._ask(source, location)
        except ShapeError as error:
            raise ModelSourceError("ModelUnreadable", f"{source.uri}: {error}") from error
        loaded = _loaded_bytes(known, source.dtype)
        return Model(location, known.shape, loaded, known.source, known.weights_file_bytes)

    async def _ask(self, source: ModelSource, location: ModelLocation) -> Figures:
        """From the hub, if the model is there and readable; other models only a pod can read."""
        if location.kind != "hf":
            return Figures("pod")
        try:
            shape = ModelShape.from_config(await self._hub_config(location))
        except ModelSourceError as error:
            if error.reason == "ModelForbidden" and source.secret_ref is not None:
                return Figures("pod")
            raise
        weights_file_bytes = await self._hub_weights_bytes(location)
        if shape.why_not_counted and (weights_file_bytes is None or shape.quantization):
            return Figures("pod")
        return Figures("config", shape, weights_file_bytes)

    async def _hub_config(self, location: ModelLocation) -> dict[str, Any]:
        url = f"{self._hf_endpoint}/{location.repository}/resolve/{location.revision}/config.json"
        status, text = await self._get(url)
        if status in {401, 403}:
            raise ModelSourceError(
                "ModelForbidden",
                f"{url} answers {status}: the model is gated or does not exist. Name the Secret with its token in"
                " spec.model.secretRef",
                lasting=False,
            )
        if status == 404:
            raise ModelSourceError("ModelNotFound", f"{url} does not exist: correct model.uri", lasting=False)
        if status != 200:
            raise ModelSourceError("ModelUnreachable", f"{url} answers {status}", lasting=False)
        return _json_object(text, url)

    async def _hub_weights_bytes(self, location: ModelLocation) -> int | None:
        """Size of the weights' files; None where the hub does not report it."""
        url = f"{self._hf_endpoint}/api/models/{location.repository}/revision/{location.revision}?blobs=true"
        try:
            status, text = await self._get(url)
            return _weights_file_bytes(_json_object(text, url)) if status == 200 else None
        except ModelSourceError:
            return None

    async def _get(self, url: str) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._hf_token}"} if self._hf_token else {}
        try:
            async with self._session.get(url, headers=headers, timeout=self._timeout) as response:
                return response.status, await read_bounded(response, _ANSWER_LIMIT_BYTES)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ModelSourceError(
                "ModelUnreachable",
                f"{url} can't be read ({type(error).__name__}): check the operator's network,"
                " or give the model's figures in spec.model.shape",
                lasting=False,
            ) from error


def _json_object(text: bytes, url: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelSourceError("ModelUnreadable", f"{url} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelSourceError("ModelUnreadable", f"{url} holds a {type(config).__name__}, expected an object")
    return config


def _weights_file_bytes(info: dict[str, Any]) -> int | None:
    """Of the safetensors that a pod downloads: those in the root, without the `consolidated` copy."""
    sizes = {
        sibling["rfilename"]: sibling["size"]
        for sibling in info.get("siblings") or []
        if isinstance(sibling, dict)
        and isinstance(sibling.get("rfilename"), str)
        and isinstance(sibling.get("size"), int)
        and sibling["rfilename"].endswith(".safetensors")
        and "/" not in sibling["rfilename"]
    }
    common = {name: size for name, size in sizes.items() if not name.startswith("consolidated")}
    return sum((common or sizes).values()) or None


def _loaded_bytes(figures: Figures, dtype: str) -> int | None:
    """Of the weights in `dtype`; None where they are counted from the shape."""
    shape, stored = figures.shape, figures.weights_file_bytes
    if shape is None or stored is None or dtype in {"auto", shape.dtype}:
        return stored if shape is not None else None
    return stored * DTYPE_BYTES[dtype] // DTYPE_BYTES[shape.dtype] if shape.why_not_counted else None


def _read_folder(location: ModelLocation, dtype: str | None) -> Model:
    folder = Path(location.path)
    if not folder.is_dir():
        raise ModelSourceError(
            "ModelNotFound", f"there is no folder {folder} on the operator's machine: correct model.uri", lasting=False
        )
    shape = ModelShape.from_folder(folder)
    counted = not (shape.why_not_counted and shape.quantization)  # what the server holds of such weights, it says
    return Model(location, shape, weights_bytes(folder, dtype), "config" if counted else "pod")
