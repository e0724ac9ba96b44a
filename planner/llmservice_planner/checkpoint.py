"""How many bytes a folder of safetensors files takes once loaded, read from the headers alone.

The format (https://huggingface.co/docs/safetensors): eight bytes of little-endian header length, a JSON header with
each tensor's `dtype`, `shape` and `data_offsets`, then the tensors. No tensor is read, no pickle is ever opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmservice_planner.model_config import ShapeError

_MAX_HEADER_BYTES = 100_000_000  # the bound of the format's own reader
_FLOATS = ("F64", "F32", "F16", "BF16")
_TARGET_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def weights_bytes(folder: Path, dtype: str | None = None) -> int | None:
    """Bytes of all the tensors in `folder`'s safetensors files; None where it holds none.

    With `dtype` (float32, bfloat16, float16) floating-point tensors count as converted to it, as the server loads them;
    quantised ones keep their size. Raises `ShapeError` where a shard is missing or its header is broken.
    """
    shards = _shards(folder)
    if not shards:
        return None
    return sum(_tensor_bytes(shard, tensor, dtype) for shard in shards for tensor in _tensors(shard))


def _shards(folder: Path) -> list[Path]:
    """The files that the index names, else every safetensors file of the folder."""
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
