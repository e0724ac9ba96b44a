"""`spec.model.uri`: where a checkpoint is, how a pod gets at it, and what its config.json says."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import aiohttp

from llmservice_operator.http_body import read_bounded
from llmservice_operator.spec import ModelSource
from llmservice_planner.shape import ModelShape, ShapeError, weights_bytes

MODELS_MOUNT = "/models"
"""Where a pod mounts the volume that holds its checkpoint."""

_FETCH_TIMEOUT_S = 10.0
_CONFIG_LIMIT_BYTES = 4 * 2**20
_HF = re.compile(r"^hf://(?P<repository>[A-Za-z0-9._-]+/[A-Za-z0-9._-]+)(@(?P<revision>[A-Za-z0-9._/-]+))?$")
_PVC = re.compile(r"^pvc://(?P<claim>[a-z0-9]([-a-z0-9.]*[a-z0-9])?)(/(?P<path>.*))?$")


class ModelSourceError(Exception):
    """The model can't be served from there. `reason` is the condition's, `lasting` is False where a retry may help."""

    def __init__(self, reason: str, message: str, *, lasting: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """Where the pod finds the checkpoint."""

    kind: Literal["file", "hf", "pvc"]
    path: str
    """Folder inside the pod."""
    fetch_uri: str | None = None
    """What the init container downloads (hf)."""
    revision: str = "main"
    claim: str | None = None
    """The PersistentVolumeClaim that is mounted (pvc)."""


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint that was found: its location and the figures that the memory arithmetic needs."""

    location: ModelLocation
    shape: ModelShape
    weights_bytes: int | None = None
    """Loaded size where the files could be read; None: counted from the shape."""


def locate(uri: str, file_root: Path | None) -> ModelLocation:
    """Where a pod finds `uri`; raises ModelSourceError for what can't work."""
    scheme = uri.partition("://")[0]
    if scheme == "file":
        return _file_location(uri, file_root)
    if scheme == "hf":
        return _hf_location(uri)
    if scheme == "pvc":
        return _pvc_location(uri)
    raise ModelSourceError(
        "UnsupportedURI",
        f"{scheme}:// is not supported yet: use hf://org/name, or copy the model into a volume and use pvc://claim/path",
    )


def _file_location(uri: str, root: Path | None) -> ModelLocation:
    if root is None:
        raise ModelSourceError(
            "FileModelsDisabled",
            "file:// is off: start the operator with --file-models-root DIR, a folder that every node"
            " or the server image has at the same path, or use hf:// or pvc://",
        )
    base = root.resolve()
    folder = (base / uri.removeprefix("file:///")).resolve()
    if not folder.is_relative_to(base) or folder == base:
        raise ModelSourceError("InvalidURI", f"{uri} leaves the operator's --file-models-root: give a path below it")
    return ModelLocation("file", str(folder))


def _hf_location(uri: str) -> ModelLocation:
    match = _HF.fullmatch(uri)
    if match is None or ".." in uri:
        raise ModelSourceError("InvalidURI", f"{uri} is not hf://org/name or hf://org/name@revision: correct model.uri")
    name = match["repository"].rpartition("/")[2]
    return ModelLocation("hf", f"{MODELS_MOUNT}/{name}", fetch_uri=uri, revision=match["revision"] or "main")


def _pvc_location(uri: str) -> ModelLocation:
    match = _PVC.fullmatch(uri)
    path = PurePosixPath((match["path"] or "") if match else "")
    if match is None or ".." in path.parts or path.is_absolute():
        raise ModelSourceError("InvalidURI", f"{uri} is not pvc://claim/path: correct model.uri")
    return ModelLocation("pvc", str(PurePosixPath(MODELS_MOUNT) / path), claim=match["claim"])


class ModelReader:
    """Finds out a model's figures: from the spec, a local folder, or the hub."""

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
        self._hf_endpoint = hf_endpoint.rstrip("/")
        self._hf_token = hf_token
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def read(self, source: ModelSource) -> Model:
        """The model's location and figures; raises ModelSourceError saying what to change."""
        location = locate(source.uri, self._file_root)
        try:
            if location.kind == "file":
                dtype = None if source.dtype == "auto" else source.dtype
                return await asyncio.to_thread(_read_folder, location, dtype)
            if source.shape is not None:
                return Model(location, ModelShape.from_fields(source.shape.model_dump(by_alias=True)))
            if location.kind == "hf":
                return Model(location, ModelShape.from_config(await self._hub_config(location)))
        except ShapeError as error:
            raise ModelSourceError("ModelUnreadable", f"{source.uri}: {error}") from error
        raise ModelSourceError(
            "ShapeUnknown",
            f"{source.uri} can't be read before the pod runs: give the model's figures in spec.model.shape"
            " (layers, heads, kvHeads, headDim, hiddenSize, intermediateSize, vocabSize; they are in its config.json)",
        )

    async def _hub_config(self, location: ModelLocation) -> dict[str, Any]:
        repository = (location.fetch_uri or "").removeprefix("hf://").partition("@")[0]
        url = f"{self._hf_endpoint}/{repository}/resolve/{location.revision}/config.json"
        headers = {"Authorization": f"Bearer {self._hf_token}"} if self._hf_token else {}
        try:
            async with self._session.get(url, headers=headers, timeout=self._timeout) as response:
                if response.status in {401, 403}:
                    raise ModelSourceError(
                        "ModelForbidden",
                        f"{url} answers {response.status}: the model is gated or does not exist. Give its figures in"
                        " spec.model.shape, or start the operator with HF_TOKEN; pods use spec.model.secretRef",
                        lasting=False,
                    )
                if response.status == 404:
                    raise ModelSourceError("ModelNotFound", f"{url} does not exist: correct model.uri", lasting=False)
                if response.status != 200:
                    raise ModelSourceError("ModelUnreachable", f"{url} answers {response.status}", lasting=False)
                text = await read_bounded(response, _CONFIG_LIMIT_BYTES)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ModelSourceError(
                "ModelUnreachable",
                f"{url} can't be read ({type(error).__name__}): check the operator's network,"
                " or give the model's figures in spec.model.shape",
                lasting=False,
            ) from error
        return _config_object(text, url)


def _config_object(text: bytes, url: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelSourceError("ModelUnreadable", f"{url} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelSourceError("ModelUnreadable", f"{url} holds a {type(config).__name__}, expected an object")
    return config


def _read_folder(location: ModelLocation, dtype: str | None) -> Model:
    folder = Path(location.path)
    if not folder.is_dir():
        raise ModelSourceError(
            "ModelNotFound", f"there is no folder {folder} on the operator's machine: correct model.uri", lasting=False
        )
    shape = ModelShape.from_folder(folder)
    return Model(location, shape, weights_bytes(folder, dtype))
