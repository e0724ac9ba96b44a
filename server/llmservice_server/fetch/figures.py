"""A checkpoint's config.json and the size of its weights, without the weights: for `llmservice plan --model URI`."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llmservice_planner.model.checkpoint import (
    INDEX,
    LENGTH_BYTES,
    StoredTensor,
    header_length,
    parse_header,
    stored_dtype,
    weight_names,
)
from llmservice_planner.model.config import names_dtype
from llmservice_planner.model.encoders import MODULES, SENTENCES, TOKENIZER, is_encoder, without_config
from llmservice_planner.model.quantization_config import SIDECARS, with_sidecars
from llmservice_planner.model.shape import ModelShape, ShapeError
from llmservice_planner.model.source import CheckpointFigures
from llmservice_server.fetch.checkpoint import needed, remote_source
from llmservice_server.fetch.source import CorruptError, FetchError, RemoteFile, RetryableError, Source, retrying

_CONFIG = "config.json"
_MOST_BYTES = 64 * 2**20
_SILENCE_S = 20.0
_ATTEMPTS = 3
_LONGEST_WAIT_S = 5.0
_REQUESTS_AT_ONCE = 8


def read_figures(uri: str) -> CheckpointFigures:
    """Of `hf://org/name[@revision]` or `s3://bucket/path`, with the credentials of `llmservice fetch`.

    Raises:
        ShapeError: it cannot be read; one sentence that says what to do.
    """
    try:
        source = remote_source(uri, _SILENCE_S)
        return _figures(source)
    except (FetchError, CorruptError) as error:
        raise ShapeError(str(error)) from error
    except RetryableError as error:
        raise ShapeError(f"{uri}: {error} ({_ATTEMPTS} attempts): check network and proxy") from error


def _figures(source: Source) -> CheckpointFigures:
    request = retrying(_ATTEMPTS, _LONGEST_WAIT_S)
    names = request(source.names)
    if _CONFIG not in names:
        modules = request(_read, source, MODULES) if MODULES in names else None
        raise FetchError(without_config(source.where, modules))
    sidecars = {name: request(_read_json, source, name) for name in SIDECARS if name in names}
    config = with_sidecars(request(_read_json, source, _CONFIG), sidecars)
    if is_encoder(config):
        config |= {name: request(_read_json, source, name) for name in (*SENTENCES, TOKENIZER) if name in names}
    weights = weight_names(needed(names))
    wants_headers = ModelShape.from_config(config).wants_headers(config)
    if wants_headers or not names_dtype(config):
        files = request(source.describe, weights)
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            headers = list(pool.map(lambda file: request.copy()(_read_header, source, file), files))
        tensors = {name: tensor for header in headers for name, tensor in header.items()}
        config = config if names_dtype(config) else {**config, "dtype": stored_dtype(tensors.values())}
        stored_bytes = sum(file.size for file in files) or None
        return CheckpointFigures(config, stored_bytes, tensors if wants_headers else {})
    if INDEX in names:
        total = request(_read_json, source, INDEX).get("metadata", {}).get("total_size")
        if isinstance(total, int) and total > 0:
            return CheckpointFigures(config, total)
    return CheckpointFigures(config, sum(file.size for file in request(source.describe, weights)) or None)


def _read_header(source: Source, file: RemoteFile) -> dict[str, StoredTensor]:
    """Of a safetensors file, of which no more than its header is read."""
    where = f"{source.where}: {file.name}"
    content, wanted = bytearray(), LENGTH_BYTES
    with source.open(file, 0) as (_, parts):
        for part in parts:
            content += part
            if len(content) >= LENGTH_BYTES:
                wanted = LENGTH_BYTES + header_length(where, bytes(content[:LENGTH_BYTES]))
            if len(content) >= wanted:
                break
    return parse_header(where, bytes(content[LENGTH_BYTES:wanted]), wanted - LENGTH_BYTES)


def _read_json(source: Source, name: str) -> dict[str, Any]:
    parsed = _read(source, name)
    if not isinstance(parsed, dict):
        raise FetchError(f"{source.where}: {name} holds a {type(parsed).__name__}, expected a JSON object")
    return parsed


def _read(source: Source, name: str) -> Any:
    (file,) = source.describe([name])
    if file.size > _MOST_BYTES:
        raise FetchError(f"{source.where}: {name} has {file.size} bytes, expected at most {_MOST_BYTES}")
    with source.open(file, 0) as (_, parts):
        content = b"".join(parts)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FetchError(f"{source.where}: {name} is no JSON ({error})") from error
