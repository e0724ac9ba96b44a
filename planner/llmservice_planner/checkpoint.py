"""The loaded size of a folder of safetensors files, read from their headers.

The format (https://huggingface.co/docs/safetensors): eight bytes of little-endian header length, a JSON header with
each tensor's `dtype`, `shape` and `data_offsets`, then the tensors. No tensor and no pickle is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmservice_planner.model_config import ShapeError

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation
_FLOATS = ("F64", "F32", "F16", "BF16")
_TARGET_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def weights_bytes(folder: Path, dtype: str | None = None) -> int | None:
    """Bytes of all tensors in the safetensors files of `folder`; None if there are none.

    With `dtype` (float32, bfloat16, float16), floating-point tensors count as converted to it; quantised ones keep
    their size. Raises `ShapeError` if a shard is missing or its header is invalid.
    """
    shards = _shards(folder)
    if not shards:
        return None
    return sum(_tensor_bytes(shard, tensor, dtype) for shard in shards for tensor in _tensors(shard))


def _shards(folder: Path) -> list[Path]:
    """The files in the index, else every safetensors file of the folder."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShapeError(f"{index} has no readable weight_map ({error!r}): download the model folder again") from error
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ShapeError(f"{folder} lacks {', '.join(missing)}, which its index names: download the folder again")
    return [folder / name for name in names]


def _tensors(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        tensors = [tensor for name, tensor in _header(path).items() if name != "__metadata__"]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ShapeError(f"{path} is no safetensors file ({error}): download it again") from error
    yield from tensors


def _header(path: Path) -> Any:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, _MAX_HEADER_BYTES))
    if len(text) != length:
        raise ValueError(f"its header should have {length} bytes, {len(text)} are there")
    return json.loads(text)


def _tensor_bytes(path: Path, tensor: Mapping[str, Any], dtype: str | None) -> int:
    try:
        if dtype is not None and tensor["dtype"] in _FLOATS:
            return math.prod(int(size) for size in tensor["shape"]) * _TARGET_BYTES[dtype]
        start, end = tensor["data_offsets"]
        return int(end) - int(start)
    except (KeyError, TypeError, ValueError) as error:
        raise ShapeError(f"{path} has a broken tensor entry ({error!r}): download it again") from error
