"""The weights of a checkpoint by its headers: how many the server holds in which format, and what adapters change."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from llmservice_planner.model.checkpoint import FLOAT_BYTES, StoredTensor
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

_VALUES = ("qweight", "weight_packed", "weight")
_SCALES = ("weight_scale_inv", "weight_scale", "scales", "SCB")
ROUTER = re.compile(r"(^|\.)(gate|router)(\.(layer|proj|wg))?$")
"""Of experts: few outputs, which decide too much to be rounded."""
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings)$")
_IN_LAYER = re.compile(r"\.\d+\.")
_ADAPTED = re.compile(r"\.\d+\.(?!mlp\.router\.classifier$)|_projections?(\.\d+)?$|^lm_head\.dense$")
"""Linear layers: in the layers all but a part of LongCat's routers, whose code reads its weight, and those of Gemma 3n
and 4 and of ModernBERT's decoder that are in none."""
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_OF_LATENTS = re.compile(r"\.kv_b_proj$")
"""Makes keys and values of latents; the server holds it in the dtype."""
_EXPERT = re.compile(r".*\blayers\.(\d+)\.(?:.*\.)?experts\.(\d+)\.(\w+)")
_FUSED = re.compile(r"(.*\.)([qkv]_proj|gate_proj|up_proj|w[13])$")
_PARTS_OF_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
LANGUAGE_MODEL = re.compile(r"(model\.)?(language|text)_model\.")
"""Begins the names of a model's text part, where it has others for images or sound."""
NOT_LOADED = re.compile(r"visual\.|(model\.)?mtp[._]")
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
        splits_queries: bool = False,
    ) -> WeightCounts:
        """From the headers of a checkpoint of so many `layers`; a head of its own is not loaded where it is `tied`.

        is_own: a model of ours holds it, which fuses matrices with the same inputs.
        splits_queries: it has queries, keys and values in one matrix, and transformers' model in three.
        """
        counting = _Counting(hidden_size, is_own=is_own, splits_queries=splits_queries)
        for module, parts in _modules(tensors, layers):
            if tied and is_head(module):
                continue
            suffix = next((each for each in _VALUES if each in parts), None)
            form = None if suffix is None else _format_of(module, parts, parts[suffix], quantization)
            if suffix is not None and form is not None:
                counting.add_quantized(module, parts, suffix, form)
            for each, tensor in parts.items():
                if each == suffix and form is None:
                    counting.add_dense(module, tensor)
                elif each not in (suffix, *SUFFIXES) and _is_loaded(tensor):
                    counting.add_dense(module, tensor, of=each)
        return cls(**counting.totals())

    @property
    def parameters(self) -> int:
        return self.quantized_parameters + self.plain_parameters + self.other_parameters

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


class _Counting:
    """Adds up the tensors of a checkpoint: the fields of `WeightCounts`."""

    def __init__(self, hidden_size: int, *, is_own: bool, splits_queries: bool) -> None:
        self._hidden_size = hidden_size
        self._is_own = is_own
        self._splits_queries = splits_queries
        self._counts: Counter[str] = Counter()
        self._matrices: dict[str, list[_Part]] = defaultdict(list)
        """By what is fused in one."""

    def add_quantized(self, module: str, parts: Mapping[str, StoredTensor], suffix: str, form: WeightFormat) -> None:
        values = parts[suffix]
        shape = (values.nbytes, 1) if form.is_table else (values.shape[0], values.shape[1])
        outputs, inputs = form.shape_of(suffix, shape, self._hidden_size)
        self._add_features(module, outputs, inputs)
        if _OF_LATENTS.search(module):
            self._counts["other_parameters"] += outputs * inputs
            return
        scale = next((parts[each].dtype for each in _SCALES if each in parts), "F16")
        self._add_part(_Part(module, outputs, inputs, form, FLOAT_BYTES.get(scale, 2)))

    def add_dense(self, module: str, tensor: StoredTensor, of: str | None = None) -> None:
        """A module's weight, or its tensor of another suffix."""
        is_weight = of is None and not module.endswith("norm")  # Cohere's have a row for each head
        if is_weight and len(tensor.shape) == _MATRIX_DIMENSIONS:
            self._add_part(_Part(module, tensor.shape[0], tensor.shape[1]))
        is_layer = is_weight or len(tensor.shape) > _MATRIX_DIMENSIONS  # not experts of DBRX
        if is_layer:
            self._add_features(module if is_weight else f"{module}.{of}", *tensor.shape)
        outputs = _outputs(module, tensor, is_weight=is_weight)
        self._counts["plain_outputs"] += outputs
        self._counts["plain_parameters" if outputs else "other_parameters"] += tensor.elements

    def _add_features(self, module: str, *shape: int) -> None:
        self._counts.update(_adapted(module, *shape))
        if self._splits_queries and module.endswith(".query_key_value"):
            self._counts["adapted_features"] += 2 * shape[-1]

    def _add_part(self, part: _Part) -> None:
        self._matrices[_fused(part.module, is_own=self._is_own)].append(part)

    def totals(self) -> Counter[str]:
        return sum((Counter(_quantized(sorted(fused))) for fused in self._matrices.values()), start=self._counts)


def _format_of(
    module: str, parts: Mapping[str, StoredTensor], values: StoredTensor, quantization: QuantizationConfig | None
) -> WeightFormat | None:
    """None: the module's values are dense."""
    if quantization is None or not (is_quantized(parts) or values.dtype not in FLOAT_BYTES):
        return None
    refuse_embedding(module)
    return quantization.format_of(module) if len(values.shape) == _MATRIX_DIMENSIONS else None


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
        size, inputs = FLOAT_BYTES["F32"], parts[0].inputs
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
    return tensor.dtype in FLOAT_BYTES and len(tensor.shape) < _MASK_DIMENSIONS


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
    is_down = "down" in module or "output" in module or module.endswith((".w2", ".fc2"))
    match shape:
        case (experts, outputs, inputs) if _IN_LAYER.search(module):
            return {"expert_features": experts * (inputs + outputs) * (1 if is_down else 2)}
        case (outputs, inputs) if _EXPERT.fullmatch(module):
            return {"expert_features": inputs + outputs * (1 if is_down else 2)}
        case (outputs, inputs) if _ADAPTED.search(module) or is_head(module):
            return {"adapted_features": inputs + outputs}
        case _:
            return {}


def is_linear(module: str, outputs: int) -> bool:
    """Whether `int8` quantises a matrix of transformers' code; embeddings are outside the layers."""
    if is_head(module):
        return outputs % CPU_COLUMNS == 0
    return bool(_IN_LAYER.search(module)) and not any(each.search(module) for each in (ROUTER, _OF_LATENTS))


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
