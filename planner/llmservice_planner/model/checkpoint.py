"""The weight files of a checkpoint, and the tensors and sizes that the headers of safetensors files give.

The format (https://huggingface.co/docs/safetensors): eight bytes of little-endian header length, a JSON header with
each tensor's `dtype`, `shape` and `data_offsets`, then the tensors. No tensor and no pickle is read.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from operator import ne
from pathlib import Path

from llmservice_planner.model.config import ShapeError

INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
LENGTH_BYTES = 8
"""Of a file's start, which `header_length` reads."""
_CHUNK_BYTES = 1 << 20
_SHOWN = 80  # characters of a name
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OTHERS = ("*.gguf", "*.onnx", "onnx/*.onnx")
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TARGET_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    begin: int = field(default=0, compare=False)
    """After the header."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def weights_bytes(folder: Path, dtype: str | None = None) -> int | None:
    """Bytes of all tensors in the safetensors files of a `folder` whose config.json names no quantisation, or mxfp4.

    None if there are none. With `dtype` (float32, bfloat16, float16), floating-point tensors count as converted to it;
    others keep their size. Raises `ShapeError` if a shard is missing, its header is invalid, or a matrix is quantised.
    """
    shards = weight_files(folder)
    if not shards:
        return None
    tensors = [item for shard in shards for item in _read_header(shard).items()]
    refuse_quantized(name for name, _ in tensors)
    return sum(
        tensor.nbytes if dtype is None or tensor.dtype not in FLOAT_BYTES else tensor.elements * _TARGET_BYTES[dtype]
        for _, tensor in tensors
    )


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """What the headers in `folder` say of its tensors. Raises `ShapeError` as `weights_bytes` does."""
    return {name: tensor for shard in weight_files(folder) for name, tensor in _read_header(shard).items()}


def has_other_head(folder: Path) -> bool:
    """Whether the files have a head of the embedding's shape and with other numbers: some fine-tunes train it."""
    stored = [(shard, name, tensor) for shard in weight_files(folder) for name, tensor in _read_header(shard).items()]
    head, embedding = (
        next(((shard, tensor) for shard, name, tensor in stored if name.endswith(part)), None)
        for part in ("lm_head.weight", "embed_tokens.weight")
    )
    if head is None or embedding is None or head[1].shape != embedding[1].shape:
        return False
    return any(map(ne, _chunks(*head), _chunks(*embedding)))


def _chunks(shard: Path, tensor: StoredTensor) -> Iterator[bytes]:
    """A tensor's numbers. Raises `ShapeError` where the file does not have them."""
    with shard.open("rb") as file:
        begin = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little") + tensor.begin
        if begin + tensor.nbytes > shard.stat().st_size:
            raise _broken(str(shard), "it ends before its tensors do")
        file.seek(begin)
        for first in range(0, tensor.nbytes, _CHUNK_BYTES):
            yield file.read(min(_CHUNK_BYTES, tensor.nbytes - first))


def stored_dtype(tensors: Iterable[StoredTensor]) -> str:
    """That of most bytes, where config.json names none; float32, as of transformers, without any tensors."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if name := _DTYPES.get(tensor.dtype):
            sizes[name] += tensor.nbytes
    return max(sizes, key=sizes.__getitem__, default="float32")


def header_length(where: str, start: bytes, most: int = _MAX_HEADER_BYTES) -> int:
    """Bytes of the header after the file's first `LENGTH_BYTES`. Raises `ShapeError` for more than `most`."""
    length = int.from_bytes(start, "little")
    if len(start) != LENGTH_BYTES or length > most:
        raise _broken(where, f"its header should have {length} bytes, expected at most {most}")
    return length


def parse_header(where: str, text: bytes, length: int) -> dict[str, StoredTensor]:
    """The tensors of a file whose header has `length` bytes. Raises `ShapeError`, which names the file."""
    if len(text) != length:
        raise _broken(where, f"its header should have {length} bytes, {len(text)} are there")
    try:
        return {
            name: StoredTensor(
                str(tensor["dtype"]),
                tuple(_size(size) for size in tensor["shape"]),
                _size(tensor["data_offsets"][1] - tensor["data_offsets"][0]),
                _size(tensor["data_offsets"][0]),
            )
            for name, tensor in json.loads(text).items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(where, f"{error!r} in its header") from error


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"a size is {value!r}")
    return value


def _broken(where: str, problem: str) -> ShapeError:
    return ShapeError(f"{where} is no safetensors file ({problem}): download it again")


def weight_names(names: Collection[str]) -> list[str]:
    """Which files of a folder are fetched for their weights, and loaded unless an index names fewer; sorted.

    Without an index `model.safetensors` has all of them. Mistral's `consolidated` files are copies in another layout.
    """
    found = sorted(name for name in names if name.endswith(".safetensors"))
    if _WHOLE in found and INDEX not in names:
        return [_WHOLE]
    return [name for name in found if not name.startswith("consolidated")] or found


def refuse_other_formats(folder: Path) -> None:
    """Raises `ShapeError` where the weights in `folder` are pickles, GGUF or ONNX alone."""
    if any(folder.glob("*.safetensors")):
        return
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise ShapeError(
            f"{folder} holds its weights as pickles only ({', '.join(pickles[:3])}), which can run any code when read: "
            "convert them to safetensors"
        )
    if others := sorted(path.name for pattern in _OTHERS for path in folder.glob(pattern)):
        raise ShapeError(
            f"{folder} holds no *.safetensors file, only {', '.join(others[:3])}, which is not served: choose a "
            "repository of the same model with safetensors"
        )


def refuse_quantized(names: Iterable[str]) -> None:
    """Raises `ShapeError` for a packed matrix among the tensors: of a config.json without a `quantization_config`."""
    if name := next((name for name in names if name.endswith((".qweight", ".weight_packed"))), None):
        raise ShapeError(
            f"{name} is quantised, of which config.json says nothing: choose a checkpoint with a quantization_config"
        )


def weight_files(folder: Path) -> list[Path]:
    """The files in the index, else those of `weight_names`.

    Raises `ShapeError` where the index cannot be read, or one of them is no file of the folder.
    """
    index = folder / INDEX
    if index.is_file():
        names, problem = _indexed(index), "which its index names"
    else:
        names = weight_names([path.name for path in folder.glob("*.safetensors")])
        problem = "which is a folder or a link to no file"
    files = {path.name for path in folder.glob("*") if path.is_file()}
    if missing := [name[:_SHOWN] for name in names if name not in files]:
        raise ShapeError(f"{folder} lacks {', '.join(missing)}, {problem}: download the folder again")
    return [folder / name for name in names]


def _indexed(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShapeError(f"{index} has no readable weight_map ({error!r}): delete it and download it again") from error
    if not names:
        raise ShapeError(f"{index} has no readable weight_map (it is empty): delete it and download it again")
    return names


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            length = header_length(str(path), file.read(LENGTH_BYTES))
            return parse_header(str(path), file.read(length), length)
    except OSError as error:
        raise ShapeError(f"{path} cannot be read ({error}): delete it and download it again") from error
