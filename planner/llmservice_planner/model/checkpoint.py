"""The loaded size of a checkpoint, read from the headers of its safetensors files.

The format (https://huggingface.co/docs/safetensors): eight bytes of little-endian header length, a JSON header with
each tensor's `dtype`, `shape` and `data_offsets`, then the tensors. No tensor and no pickle is read.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from llmservice_planner.model.config import ShapeError
from llmservice_planner.model.quantization import (
    CPU_COLUMNS,
    SUFFIXES,
    Quantization,
    QuantizationConfig,
    WeightFormat,
    int8_bytes,
    is_quantized,
    linear_bytes,
    module_and_suffix,
)

INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
LENGTH_BYTES = 8
"""Of a file's start, which `header_length` reads."""
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OTHERS = ("*.gguf", "*.onnx", "onnx/*.onnx")
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TARGET_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

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
        tensor.nbytes if dtype is None or tensor.dtype not in _FLOAT_BYTES else tensor.elements * _TARGET_BYTES[dtype]
        for _, tensor in tensors
    )


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """What the headers in `folder` say of its tensors. Raises `ShapeError` as `weights_bytes` does."""
    return {name: tensor for shard in weight_files(folder) for name, tensor in _read_header(shard).items()}


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
                int(tensor["data_offsets"][1]) - int(tensor["data_offsets"][0]),
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


def weight_files(folder: Path) -> list[Path]:
    """The files in the index, else those of `weight_names`.

    Raises `ShapeError` where the index cannot be read, or names one that is not in the folder.
    """
    index = folder / INDEX
    if not index.is_file():
        return [folder / name for name in weight_names([file.name for file in folder.glob("*.safetensors")])]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShapeError(f"{index} has no readable weight_map ({error!r}): download the model folder again") from error
    if not names:
        raise ShapeError(f"{index} has no readable weight_map (it is empty): download the model folder again")
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ShapeError(f"{folder} lacks {', '.join(missing)}, which its index names: download the folder again")
    return [folder / name for name in names]


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            length = header_length(str(path), file.read(LENGTH_BYTES))
            return parse_header(str(path), file.read(length), length)
    except OSError as error:
        raise ShapeError(f"{path} cannot be read ({error}): download it again") from error


_VALUES = ("qweight", "weight_packed", "weight")
_SCALES = ("weight_scale_inv", "weight_scale", "scales", "SCB")
_ROUTER = re.compile(r"(^|\.)(gate|router)(\.layer)?$")
"""Of experts: few outputs, which decide too much to be rounded."""
_LINEAR_ROUTER = re.compile(r"\.router\.gate$|\.ffn\.router\.layer$")
"""Of AFMoE and DBRX, in whose code they are linear layers."""
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings)$")
_IN_LAYER = re.compile(r"\.\d+\.")
_BESIDE_LAYERS = re.compile(r"_projections?(\.\d+)?$")
"""Linear layers of Gemma 3n and 4 that are in none of theirs."""
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_OF_LATENTS = re.compile(r"\.kv_b_proj$")
"""Makes keys and values of latents; the server holds it in the dtype."""
_EXPERT = re.compile(r".*\blayers\.(\d+)\.(?:.*\.)?experts\.(\d+)\.(\w+)")
_FUSED = re.compile(r"(.*\.)([qkv]_proj|gate_proj|up_proj|w[13])$")
_PARTS_OF_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
LANGUAGE_MODEL = re.compile(r"(model\.)?(language|text)_model\.")
"""Begins the names of a model's text part, where it has others for images or sound."""
NOT_LOADED = re.compile(r"visual\.|(model\.)?mtp\.")
"""Begins the names of images in the first checkpoints of Qwen 2 and 2.5 VL, whose text is named as without images, and
of what predicts further tokens (MiMo-V2, Ernie 4.5)."""
_MATRIX_DIMENSIONS, _MASK_DIMENSIONS = 2, 4
"""Old checkpoints hold their causal masks, which no model loads."""


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """The weights of a model, from the headers of its files, from which their bytes in the server's memory follow."""

    quantized_parameters: int = 0
    """In matrices that the checkpoint has quantised, and that the server can hold so."""
    quantized_outputs: int = 0
    stored_bytes: int = 0
    """Of these matrices, held as they are stored."""
    cpu_stored_bytes: int = 0
    """Likewise on a CPU, where those that were made for products of 8-bit integers are held for these."""
    cpu_bytes: int = 0
    """Of those that a CPU does not dequantise by its own choice (auto)."""
    cpu_dense_parameters: int = 0
    """In those that it does."""
    plain_parameters: int = 0
    """In other matrices, which the server quantises at load where it is told to (int8)."""
    plain_outputs: int = 0
    other_parameters: int = 0
    """In embeddings, norms and biases, which are held in the dtype."""
    adapted_features: int = 0
    """Inputs and outputs of the linear layers that every adapter can change: all but experts."""
    expert_features: int = 0
    """Of experts, as an adapter's slot has them: gate and up have their inputs each, and the outputs of both."""

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, StoredTensor],
        quantization: QuantizationConfig | None,
        *,
        layers: int,
        hidden_size: int,
        tied: bool,
        is_own: bool = False,
    ) -> WeightCounts:
        """From the headers of a checkpoint of so many `layers`; a head of its own is not loaded where it is `tied`.

        is_own: a model of ours holds it, which fuses matrices with the same inputs and whose routers adapters change.
        """
        counts: Counter[str] = Counter()
        matrices: dict[str, list[_Part]] = defaultdict(list)
        """By what is fused in one."""
        for module, parts in _modules(tensors, layers):
            if tied and is_head(module):
                continue
            suffix = next((each for each in _VALUES if each in parts), None)
            dense = {each: part for each, part in parts.items() if each not in SUFFIXES and _is_loaded(part)}
            if suffix is not None:
                values, form = parts[suffix], None
                if quantization is not None and (is_quantized(parts) or values.dtype not in _FLOAT_BYTES):
                    refuse_embedding(module)
                    form = quantization.format_of(module)
                if form is None or len(values.shape) != 2:
                    dense[suffix] = values
                else:
                    shape = (values.nbytes, 1) if form.is_table else (values.shape[0], values.shape[1])
                    outputs, inputs = form.shape_of(suffix, shape, hidden_size)
                    counts.update(_adapted(module, outputs, inputs))
                    if _OF_LATENTS.search(module):
                        counts["other_parameters"] += outputs * inputs
                        continue
                    scale = next((parts[each].dtype for each in _SCALES if each in parts), "F16")
                    matrix = _Part(module, outputs, inputs, form, _FLOAT_BYTES.get(scale, 2))
                    matrices[_fused(module, is_own=is_own)].append(matrix)
            for each, part in dense.items():
                outputs = _outputs(module, part, is_weight=each == suffix)
                if each == suffix and len(part.shape) == 2:
                    matrices[_fused(module, is_own=is_own)].append(_Part(module, part.shape[0], part.shape[1]))
                is_layer = each == suffix or len(part.shape) > _MATRIX_DIMENSIONS  # not experts of DBRX
                is_adapted = is_own or not _ROUTER.search(module) or _LINEAR_ROUTER.search(module)
                if is_layer and is_adapted:
                    counts.update(_adapted(module if each == suffix else f"{module}.{each}", *part.shape))
                counts["plain_outputs"] += outputs
                counts["plain_parameters" if outputs else "other_parameters"] += part.elements
        for fused in matrices.values():
            counts.update(_quantized(sorted(fused)))
        return cls(**counts)

    def held_bytes(self, quantization: Quantization, *, on_cpu: bool, dtype_bytes: int) -> int:
        """In the server's memory."""
        matrices, dense = 0, self.plain_parameters + self.other_parameters
        if quantization == "dense":
            dense += self.quantized_parameters
        elif quantization == "int8":
            parameters, outputs = self.quantized_parameters, self.quantized_outputs
            matrices = int8_bytes(parameters + self.plain_parameters, outputs + self.plain_outputs, on_cpu=on_cpu)
            dense = self.other_parameters
        elif not on_cpu:
            matrices = self.stored_bytes
        elif quantization == "stored":
            matrices = self.cpu_stored_bytes
        else:
            matrices, dense = self.cpu_bytes, dense + self.cpu_dense_parameters
        return matrices + dense * dtype_bytes


def refuse_embedding(module: str) -> None:
    """Raises `ShapeError` for an embedding, of a module that is quantised."""
    if _EMBEDDING.search(module):
        raise ShapeError(
            f"{module} is quantised, which is served of linear layers only: quantise the checkpoint without its "
            "embeddings"
        )


def refuse_quantized(names: Iterable[str]) -> None:
    """Raises `ShapeError` for a packed matrix among the tensors: of a config.json without a `quantization_config`."""
    if name := next((name for name in names if name.endswith((".qweight", ".weight_packed"))), None):
        raise ShapeError(
            f"{name} is quantised, of which config.json says nothing: choose a checkpoint with a quantization_config"
        )


def refuse_separate_experts(names: Iterable[str]) -> None:
    """Raises `ShapeError` where tensors of gpt-oss are of one expert each, as llmcompressor writes them."""
    if name := next(filter(_EXPERT.match, names), None):
        raise ShapeError(
            f"{name} is of one expert, but experts of gpt-oss are served from tensors of all, in mxfp4 or dense: "
            "choose such a checkpoint"
        )


class _Part(NamedTuple):
    """A module's matrix, which may be fused with others."""

    module: str
    outputs: int
    inputs: int
    form: WeightFormat | None = None
    scale_bytes: int = 0


def _fused(module: str, *, is_own: bool) -> str:
    """The same for the modules that the server fuses: experts everywhere, others in models of ours."""
    return _FUSED.sub(r"\1", module) if is_own or _EXPERT.fullmatch(module) else module


def _quantized(parts: Sequence[_Part]) -> dict[str, int]:
    """What a matrix of these parts adds to the counts of quantised ones; it is dense if their formats differ."""
    quantized = [part for part in parts if part.form is not None]
    parameters = sum(part.outputs * part.inputs for part in quantized)
    outputs = sum(part.outputs for part in quantized)
    form, scale_bytes = parts[0].form, parts[0].scale_bytes
    if form is None or any((part.form, part.scale_bytes) != (form, scale_bytes) for part in parts):
        return {"plain_parameters": parameters, "plain_outputs": outputs}
    if any(part.outputs % (form.rows or 1) for part in parts[:-1]):  # a block would have outputs of two parts
        form = replace(form, rows=1)

    def held(quantization: Quantization, *, on_cpu: bool) -> int:
        size, inputs = _FLOAT_BYTES["F32"], parts[0].inputs
        return linear_bytes(
            outputs, inputs, form, quantization, on_cpu=on_cpu, dtype_bytes=size, scale_bytes=scale_bytes
        )

    is_dense = form.held_as("auto", on_cpu=True, outputs=outputs) == "dense"
    return {
        "quantized_parameters": parameters,
        "quantized_outputs": outputs,
        "stored_bytes": held("stored", on_cpu=False),
        "cpu_stored_bytes": held("stored", on_cpu=True),
        "cpu_bytes": 0 if is_dense else held("auto", on_cpu=True),
        "cpu_dense_parameters": parameters * is_dense,
    }


def has_head(tensors: Iterable[str]) -> bool:
    """Whether there is an output head among the names; without one it is the embedding."""
    return any(is_head(name.rpartition(".")[0]) for name in tensors)


def is_head(module: str) -> bool:
    return _HEAD.search(module) is not None


def _modules(tensors: Mapping[str, StoredTensor], layers: int) -> Iterator[tuple[str, Mapping[str, StoredTensor]]]:
    """Those that the language model loads, with their tensors by suffix."""
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, suffix = module_and_suffix(name)
        modules[module][suffix] = tensor
    is_part = any(LANGUAGE_MODEL.match(module) for module in modules)
    for module, parts in modules.items():
        layer = _LAYER.search(module)
        is_extra = layer is not None and int(layer[2]) >= layers  # that predicts further tokens (GLM-4-MoE)
        is_other = NOT_LOADED.match(module) is not None
        if not (is_extra or is_other) and (not is_part or LANGUAGE_MODEL.match(module) or is_head(module)):
            yield module, parts


def _is_loaded(tensor: StoredTensor) -> bool:
    return tensor.dtype in _FLOAT_BYTES and len(tensor.shape) < _MASK_DIMENSIONS


def _outputs(module: str, tensor: StoredTensor, *, is_weight: bool) -> int:
    """Of what `int8` quantises: a matrix, or those of all experts in one tensor; 0: it is something else."""
    match tensor.shape:
        case (experts, outputs, _) if _IN_LAYER.search(module):
            return experts * outputs
        case (outputs, _) if is_weight and is_linear(module, outputs):
            return outputs
        case _:
            return 0


def _adapted(module: str, *shape: int) -> dict[str, int]:
    """What a tensor of any kind adds to the features of adapters' slots."""
    is_down = "down" in module or "output" in module or module.endswith(".w2")
    match shape:
        case (experts, outputs, inputs) if _IN_LAYER.search(module):
            return {"expert_features": experts * (inputs + outputs) * (1 if is_down else 2)}
        case (outputs, inputs) if _EXPERT.fullmatch(module):
            return {"expert_features": inputs + outputs * (1 if is_down else 2)}
        case (outputs, inputs) if _IN_LAYER.search(module) or _BESIDE_LAYERS.search(module) or is_head(module):
            return {} if _OF_LATENTS.search(module) else {"adapted_features": inputs + outputs}
        case _:
            return {}


def is_linear(module: str, outputs: int) -> bool:
    """Whether `int8` quantises a matrix of transformers' code; embeddings are outside the layers."""
    if is_head(module):
        return outputs % CPU_COLUMNS == 0
    return bool(_IN_LAYER.search(module)) and not any(each.search(module) for each in (_ROUTER, _OF_LATENTS))


def place_of(module: str) -> str:
    """The same for a checkpoint's matrix and for its part of transformers' model.

    Names of a language model beside other parts begin with its own, and experts are named by family.
    """
    prefix = LANGUAGE_MODEL.match(module)
    name = module[prefix.end() if prefix else 0 :].removeprefix("model.")
    if (expert := _EXPERT.fullmatch(name)) is None:
        return name.replace(".block_sparse_moe.", ".mlp.")  # Mixtral's router
    layer, number, part = expert.groups()
    return f"layers.{layer}.experts.{number}.{_PARTS_OF_EXPERT.get(part, part)}"
