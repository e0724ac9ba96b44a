"""Reads a model's figures: from the spec, its config.json in a folder or at the hub; the rest only a pod can read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.http_body import read_bounded
from llmservice_operator.locations import Figures, Model, ModelLocation, ModelSourceError, locate
from llmservice_planner.model.checkpoint import (
    LENGTH_BYTES,
    StoredTensor,
    header_length,
    parse_header,
    stored_dtype,
    weight_names,
)
from llmservice_planner.model.config import names_dtype, patched
from llmservice_planner.model.encoders import SENTENCES, TOKENIZER, is_encoder
from llmservice_planner.model.quantization_config import SIDECARS, with_sidecars
from llmservice_planner.model.shape import DTYPE_BYTES, ModelShape, ShapeError, weights_bytes

DEFAULT_HUB = "https://huggingface.co"

_FETCH_TIMEOUT_S = 10.0
_ANSWER_LIMIT_BYTES = 4 * 2**20
_HEADERS_LIMIT_BYTES = 32 * 2**20
"""Of all shards together; a mixture of 160 experts in 90 layers has 15 MB."""
_HEADERS_AT_ONCE = 8
"""Large checkpoints have more than a hundred shards, each a request of its own."""


class ModelReader:
    """Reads a model's figures from the spec, a local folder, or the hub; never with a user's Secret.

    Threads parse and count what is read, which takes seconds for a large checkpoint: the event loop renews the Lease.
    """

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
        self._hf_token = (hf_token or "").strip()  # a Secret made with `echo` ends in a newline
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def read(self, source: ModelSource, known: Figures | None = None) -> Model:
        """The model's location and figures, with `known` ones instead of a request; raises ModelSourceError."""
        mirror = self._hf_endpoint if self._hf_endpoint != DEFAULT_HUB else None
        location = locate(source, self._file_root, mirror)
        try:
            if location.kind == "file" and self._sees_files:
                dtype = None if source.dtype == "auto" else source.dtype
                return await asyncio.to_thread(_read_folder, location, dtype, source.config_overrides)
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
            config = patched(await self._hub_config(location), source.config_overrides)
            shape = await asyncio.to_thread(ModelShape.from_config, config)
        except ModelSourceError as error:
            if error.reason == "ModelForbidden" and source.secret_ref is not None:
                return Figures("pod")
            raise
        sizes = await self._hub_weights(location)
        weights_file_bytes = sum(sizes.values()) or None
        wants_headers = shape.wants_headers(config)
        if wants_headers or not names_dtype(config):
            tensors = await self._hub_tensors(location, sizes)
            if not names_dtype(config):
                shape = replace(shape, dtype=stored_dtype(tensors.values()))
            if wants_headers:
                shape = await asyncio.to_thread(shape.counted, config, tensors)
        if shape.why_not_counted and (weights_file_bytes is None or shape.quantization):
            return Figures("pod")
        return Figures("config", shape, weights_file_bytes)

    async def _hub_config(self, location: ModelLocation) -> dict[str, Any]:
        url = self._file_url(location, "config.json")
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
        config = _json_object(text, url)
        if not config.get("quantization_config"):
            config = with_sidecars(config, await self._hub_objects(location, SIDECARS))
        names = [*SENTENCES, TOKENIZER] if is_encoder(config) else []
        return config | await self._hub_objects(location, names)

    async def _hub_objects(self, location: ModelLocation, names: Iterable[str]) -> dict[str, dict[str, Any] | None]:
        """By name; None: the repository has no such file."""
        names = [*names]
        found = await asyncio.gather(*(self._hub_object(location, name) for name in names))
        return dict(zip(names, found, strict=True))

    async def _hub_object(self, location: ModelLocation, name: str) -> dict[str, Any] | None:
        url = self._file_url(location, name)
        status, text = await self._get(url)
        if status not in {200, 404}:  # what is read now is kept
            raise ModelSourceError("ModelUnreachable", f"{url} answers {status}", lasting=False)
        return _json_object(text, url) if status == 200 else None

    async def _hub_weights(self, location: ModelLocation) -> dict[str, int]:
        """The sizes of the weights' files; empty where the hub does not report them."""
        url = f"{self._hf_endpoint}/api/models/{location.repository}/revision/{location.revision}?blobs=true"
        try:
            status, text = await self._get(url)
            return _weights_files(_json_object(text, url)) if status == 200 else {}
        except ModelSourceError:
            return {}

    async def _hub_tensors(self, location: ModelLocation, names: Iterable[str]) -> dict[str, StoredTensor]:
        """Of the headers of the weights' files; empty where one cannot be read, and a pod has to count them."""
        tensors: dict[str, StoredTensor] = {}
        left = _HEADERS_LIMIT_BYTES
        place = asyncio.Semaphore(_HEADERS_AT_ONCE)

        async def read(url: str) -> None:
            nonlocal left
            async with place, self._request(url) as response:
                response.raise_for_status()
                length = header_length(url, await response.content.readexactly(LENGTH_BYTES), left)
                left -= length
                header = await response.content.readexactly(length)
                tensors.update(await asyncio.to_thread(parse_header, url, header, length))

        try:
            async with asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(read(self._file_url(location, name)))
        except* (aiohttp.ClientError, TimeoutError, ValueError, EOFError):
            tensors.clear()
        return tensors

    def _file_url(self, location: ModelLocation, name: str) -> str:
        return f"{self._hf_endpoint}/{location.repository}/resolve/{location.revision}/{name}"

    def _request(self, url: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if not (self._hf_token.isascii() and self._hf_token.isprintable()):
            raise ModelSourceError(
                "ModelUnreachable",
                f"{url} can't be read: the operator's HF_TOKEN has characters that are not printable ASCII: correct"
                " it and restart the operator",
                lasting=False,
            )
        headers = {"Authorization": f"Bearer {self._hf_token}"} if self._hf_token else {}
        return self._session.get(url, headers=headers, timeout=self._timeout)

    async def _get(self, url: str) -> tuple[int, bytes]:
        try:
            async with self._request(url) as response:
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


def _weights_files(info: dict[str, Any]) -> dict[str, int]:
    """The sizes of the safetensors that a pod downloads from the root."""
    sizes = {
        sibling["rfilename"]: sibling["size"]
        for sibling in info.get("siblings") or []
        if isinstance(sibling, dict)
        and isinstance(sibling.get("rfilename"), str)
        and isinstance(sibling.get("size"), int)
        and "/" not in sibling["rfilename"]
    }
    return {name: sizes[name] for name in weight_names(sizes)}


def _loaded_bytes(figures: Figures, dtype: str) -> int | None:
    """Of the weights in `dtype`; None where they are counted from the shape."""
    shape, stored = figures.shape, figures.weights_file_bytes
    if shape is not None and shape.counts is not None:
        return None
    if shape is None or stored is None or dtype in {"auto", shape.dtype}:
        return stored if shape is not None else None
    return stored * DTYPE_BYTES[dtype] // DTYPE_BYTES[shape.dtype] if shape.why_not_counted else None


def _read_folder(location: ModelLocation, dtype: str | None, overrides: Mapping[str, Any] | None) -> Model:
    folder = Path(location.path)
    if not folder.is_dir():
        raise ModelSourceError(
            "ModelNotFound", f"there is no folder {folder} on the operator's machine: correct model.uri", lasting=False
        )
    shape = ModelShape.from_folder(folder, overrides)
    read_by_pod = shape.why_not_counted and shape.quantization  # there are no headers
    loaded = weights_bytes(folder, dtype) if shape.counts is None else None
    return Model(location, shape, loaded, "pod" if read_by_pod else "config")
