"""The shape of a decoder-only model or an encoder, from which its memory and speed are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from operator import mul
from pathlib import Path
from typing import Any

from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.model.checkpoint import (
    StoredTensor,
    has_other_head,
    read_tensors,
    refuse_other_formats,
    refuse_quantized,
    stored_dtype,
    weights_bytes,
)
from llmservice_planner.model.config import (
    ShapeError,
    max_seq_length,
    names_dtype,
    patched,
    read_config,
    refuse_processing,
    shape_fields,
)
from llmservice_planner.model.dimensions import Dimensions
from llmservice_planner.model.encoders import is_encoder
from llmservice_planner.model.families import FAMILIES
from llmservice_planner.model.quantization import (
    CPU_COLUMNS,
    Quantization,
    QuantizationError,
    WeightFormat,
    linear_bytes,
)
from llmservice_planner.model.quantization_config import read_quantization
from llmservice_planner.model.weight_counts import WeightCounts, has_head, refuse_separate_experts

__all__ = ["DTYPE_BYTES", "KV_SCALE_BYTES", "ModelShape", "ShapeError", "weights_bytes"]

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of one element, by the names that `--dtype` and `--kv-dtype` take."""
KV_SCALE_BYTES = 4
"""A float32 scale per key and per value of a head in an fp8 cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(Dimensions):
    """A model's dimensions and formats. Raises `ShapeError` if they contradict each other."""

    architecture: str = "llama"
    max_position_embeddings: int | None = None
    max_seq_length: int | None = None
    """Tokens of an encoder's input where no other maximum is given; None, or more than it knows: all positions."""
    dtype: str = "bfloat16"
    """Element type of the checkpoint, to which `dtype: auto` resolves."""
    quantization: str | None = None
    """The format of a quantised checkpoint's matrices: a method (fp8, awq, gptq) or a `WeightFormat.code`."""
    encoder_parameters: int = 0
    """All parameters of an encoder, which has no KV cache and no output head; 0: a decoder."""
    counts: WeightCounts | None = None
    """Of the checkpoint's headers; None: they are not needed, or have not been read."""

    def __post_init__(self) -> None:
        Dimensions.__post_init__(self)
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ShapeError(f"dtype {self.dtype} is not known: use float32, bfloat16 or float16")
        if self.quantization:
            try:
                WeightFormat.parse(self.quantization)
            except QuantizationError as error:
                raise ShapeError(str(error)) from error

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a parsed Hugging Face `config.json`. Raises `ShapeError`."""
        shape = cls(**shape_fields(config))
        if not is_encoder(config):
            return shape
        refuse_processing(config)
        shape = replace(shape, max_seq_length=max_seq_length(config))
        if shape.is_encoder:
            return shape
        headless = replace(shape, tie_word_embeddings=True, sliding_window=None, sliding_layers=0)
        # Behind EmbeddingGemma's pooling are two dense layers; a classifier has a row for its one label.
        more = 8 * shape.hidden_size**2 if config.get("use_bidirectional_attention") else shape.hidden_size
        return replace(headless, encoder_parameters=headless.num_parameters + more)

    @classmethod
    def from_folder(cls, folder: Path, overrides: Mapping[str, Any] | None = None) -> ModelShape:
        """From the `config.json` of a model folder, and its files' headers if need be. Raises `ShapeError`.

        overrides: of config.json, as `patched` takes them.
        """
        config = patched(read_config(folder), overrides)
        refuse_other_formats(folder)
        if not names_dtype(config):
            config["dtype"] = stored_dtype(read_tensors(folder).values())
        shape = cls.from_config(config)
        if not shape.wants_headers(config):
            return shape
        if shape.tie_word_embeddings and has_other_head(folder):
            shape = replace(shape, tie_word_embeddings=False)
        return shape.counted(config, read_tensors(folder))

    def counted(self, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> ModelShape:
        """With the weights of a checkpoint, which transformers' code holds, instead of those of a known layout.

        `config`: its config.json, of which this is the shape; `tensors`: of its files' headers; none: the same shape.
        """
        if not tensors:
            return self
        if self.architecture == "gpt_oss":
            refuse_separate_experts(tensors)
        if (quantization := read_quantization(config)) is None:
            refuse_quantized(tensors)
        tied = self.tie_word_embeddings or not has_head(tensors)
        counts = WeightCounts.of(
            {name: tensor for name, tensor in tensors.items() if not self._lacks(name)},
            quantization,
            layers=self.layers,
            hidden_size=self.hidden_size,
            tied=tied,
            is_own=self._is_own,
            splits_queries=self.architecture == "sarvam_moe",
        )
        head = (self.hidden_size + self.vocab_size) * tied
        counts = replace(counts, adapted_features=counts.adapted_features + head)
        return replace(self, tie_word_embeddings=tied, counts=counts)

    def _lacks(self, tensor: str) -> bool:
        """Whether it is a bias that a known layout has no place for: AutoGPTQ writes zeros for every matrix."""
        module, _, suffix = tensor.rpartition(".")
        part = module.rpartition(".")[2]
        of_attention = dict.fromkeys(("q_proj", "k_proj", "v_proj"), self.qkv_bias) | {"o_proj": self.o_bias}
        is_bias = suffix == "bias" and part.endswith("_proj")
        return self._is_own and is_bias and not of_attention.get(part, self.mlp_bias)

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> ModelShape:
        """From the camelCase fields of `spec.model.shape` or `--shape`, as numbers or text. Raises `ShapeError`."""
        unknown = sorted(set(given) - set(FIELD_NAMES))
        if unknown:
            raise ShapeError(f"unknown shape key {', '.join(unknown)}: the keys are {', '.join(FIELD_NAMES)}")
        missing = [key for key in _REQUIRED if given.get(key) is None]
        if missing:
            raise ShapeError(f"the shape lacks {', '.join(missing)}: at least {', '.join(_REQUIRED)} are needed")
        values = {FIELD_NAMES[key]: _parse(key, value) for key, value in given.items() if value is not None}
        values.setdefault("kv_heads", values["heads"])
        values.setdefault("head_dim", values["hidden_size"] // max(1, values["heads"]))
        if values.get("sliding_window"):
            values.setdefault("sliding_layers", values["layers"])
        counts = {name: values.pop(name) for name in _COUNTS if name in values}
        is_complete = bool(counts.get("other_parameters"))  # norms are some of every checkpoint
        return cls(**values, counts=WeightCounts(**counts) if is_complete else None)

    def to_fields(self) -> dict[str, Any]:
        """The camelCase fields for `from_fields`, without defaults; those of `counts` are beside the others."""
        values = asdict(self)
        values |= values.pop("counts") or {}
        return {_camel(name): value for name, value in values.items() if value != _FIELDS[name].default}

    @property
    def why_not_counted(self) -> str | None:
        """Why the weights' bytes have to be read from the files; None: they are counted from the shape."""
        if not self.is_encoder and self.architecture not in FAMILIES and self.counts is None:
            return f"the layout of {self.architecture} is not known"
        return None

    def wants_headers(self, config: Mapping[str, Any]) -> bool:
        """Whether its files' headers say best how large the weights are. `config`: that of which this is the shape.

        Transformers' code holds them, or they are quantised, of which checkpoints leave some layers out, or the files
        may have more: what is for images or sound, or a copy of the embedding as the head.
        """
        if self.is_encoder or self.counts is not None:
            return False
        if self.quantization is not None and self._is_own:
            return not WeightFormat.parse(self.quantization).is_for_experts
        return not self._is_own or self.tie_word_embeddings or "text_config" in config or "vision_config" in config

    @property
    def _is_own(self) -> bool:
        family = FAMILIES.get(self.architecture)
        return family is not None and family.served_architecture is not None

    @property
    def is_encoder(self) -> bool:
        return self.encoder_parameters > 0

    @property
    def takes_int8(self) -> bool:
        """Whether the server quantises it at load; experts of gpt-oss are in one tensor, whatever their format."""
        return self.architecture != "gpt_oss"

    @property
    def default_model_len(self) -> int | None:
        """Tokens of the longest request where no maximum is given; None: the positions are not known."""
        return min(filter(None, (self.max_seq_length, self.max_position_embeddings)), default=None)

    @property
    def num_parameters(self) -> int:
        """All stored parameters including embeddings (a tied head counts once)."""
        if self.is_encoder:
            return self.encoder_parameters
        if self.counts is not None:
            return self.counts.parameters
        return self.layout_parameters

    def weights_bytes(self, dtype: str, quantization: Quantization = "auto", *, on_cpu: bool = False) -> int:
        """The server's weights in memory: matrices as `quantization` says, embeddings and all else in `dtype`.

        Checkpoints do not quantise the output head; `int8` does. A tied one is not counted.
        """
        width = DTYPE_BYTES[dtype]
        form = None if self.quantization is None else WeightFormat.parse(self.quantization)
        if self.counts is not None:
            return self.counts.held_bytes(quantization, on_cpu=on_cpu, dtype_bytes=width)
        if form is None and quantization != "int8":
            return self.num_parameters * width
        only_experts = form is not None and form.is_for_experts
        quantized, dense = self._matrices_bytes(form, width, quantization, on_cpu=on_cpu, only_experts=only_experts)
        if not self.tie_word_embeddings:
            quantized += self.head_bytes(dtype, quantization, on_cpu=on_cpu)
            dense += self.vocab_size * self.hidden_size
        return quantized + (self.num_parameters - dense) * width

    def expert_bytes(self, dtype: str, quantization: Quantization = "auto", *, on_cpu: bool = False) -> int:
        """Those of the server's weights that routed experts have."""
        form = None if self.quantization is None else WeightFormat.parse(self.quantization)
        is_dense = form is None and (quantization != "int8" or not self._is_own)
        wanted: Quantization = "dense" if is_dense else quantization
        return self._matrices_bytes(form, DTYPE_BYTES[dtype], wanted, on_cpu=on_cpu, only_experts=True)[0]

    def _matrices_bytes(
        self, form: WeightFormat | None, width: int, quantization: Quantization, *, on_cpu: bool, only_experts: bool
    ) -> tuple[int, int]:
        """Of all matrices that can be quantised, and their parameters; none of an encoder's."""
        if self.is_encoder:
            return 0, 0
        scale_bytes = DTYPE_BYTES[self.dtype]
        if form is not None and form.method != "compressed-tensors":
            scale_bytes = 4 if form.method == "fp8" else 2
        total = parameters = 0
        for count, outputs, inputs in self.matrices(only_experts=only_experts):
            size = linear_bytes(
                outputs, inputs, form, quantization, on_cpu=on_cpu, dtype_bytes=width, scale_bytes=scale_bytes
            )
            total += count * size
            parameters += count * outputs * inputs
        return total, parameters

    def head_bytes(self, dtype: str, quantization: Quantization, *, on_cpu: bool) -> int:
        width, fits = DTYPE_BYTES[dtype], self._is_own or self.vocab_size % CPU_COLUMNS == 0
        wanted: Quantization = "int8" if quantization == "int8" and fits else "dense"
        return linear_bytes(self.vocab_size, self.hidden_size, None, wanted, on_cpu=on_cpu, dtype_bytes=width)

    def adapter_slot_bytes(self, rank: int, dtype: str, *, experts: bool = False) -> int:
        """A LoRA adapter of that rank on every linear layer, with or without `experts`.

        Each part of a fused matrix has factors of its own; those of an expert's gate and up are one matrix of both.
        """
        features = (self.counts.adapted_features if self.counts else 0) or self.layout_features
        return rank * (features + self.adapted_expert_features * experts) * DTYPE_BYTES[dtype]

    @property
    def adapted_expert_features(self) -> int:
        """As of `WeightCounts`; 0: there are no experts."""
        if self.counts is not None and not self._is_own:
            return self.counts.expert_features
        return self.layout_expert_features

    @property
    def active_parameters(self) -> int:
        """Parameters used for one token: all except the experts that it is not routed to."""
        unused = self.moe_layers * (self.num_experts - self.experts_per_token) * self.expert_parameters
        return max(1, self.num_parameters - unused)

    @property
    def kv_heads_by_kind(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Layers with keys and values of their own, KV heads and their width: of all tokens, and of a window."""
        full, sliding = self.own_layers
        of_full = self.full_kv_heads or self.kv_heads, self.full_head_dim or self.head_dim
        return (full, *of_full), (sliding, self.kv_heads, self.head_dim)

    def kv_bytes_per_token(self, dtype: str, device_count: int = 1) -> int:
        """KV-cache bytes of one token over all layers and all `device_count`, with fp8's scales; 0 for an encoder."""
        layers = (layers for layers, *_ in self.kv_heads_by_kind)
        bytes_each = (rows * _row_bytes(numbers, dtype) for rows, numbers in self._layer_rows(device_count))
        return sum(map(mul, layers, bytes_each))

    @property
    def window_share(self) -> float:
        """Of a token's keys and values, those in layers with a window."""
        full, sliding = (layers * kv_heads * head_dim for layers, kv_heads, head_dim in self.kv_heads_by_kind)
        return sliding / (full + sliding)

    def block_groups(self, block_size: int, step_tokens: int) -> BlockGroups:
        """Of the layers in the server's KV cache, where several with small keys take the place of one."""
        rows = [kv_heads * head_dim for _, kv_heads, head_dim in self.kv_heads_by_kind]
        largest = max(row for row, layers in zip(rows, self.own_layers, strict=True) if layers)
        full, sliding = (
            math.ceil(layers / max(1, largest // row)) for row, layers in zip(rows, self.own_layers, strict=True)
        )
        return BlockGroups.of(block_size, full + sliding, sliding, self.sliding_window, step_tokens)

    def place_bytes(self, dtype: str, device_count: int) -> int:
        """Of a token in a place of the KV cache: of a layer with the largest keys, and fp8's scales of each kind."""
        kinds = {kind for kind, layers in zip(self._layer_rows(device_count), self.own_layers, strict=True) if layers}
        largest = max(map(math.prod, kinds))
        scales = sum(largest // numbers for _, numbers in kinds) if dtype == "fp8" else 0
        return largest * DTYPE_BYTES[dtype] + scales * KV_SCALE_BYTES

    def _layer_rows(self, device_count: int) -> tuple[tuple[int, int], ...]:
        """Of a token in a layer of each of `kv_heads_by_kind`: rows over all `device_count` GPUs, and numbers in a row.

        Heads are split over the GPUs, and repeated where there are more GPUs than heads; MLA's latent is on each GPU.
        """
        if self.is_encoder:
            return ((0, 1),) * 2
        if self.is_mla:
            return ((device_count, self.kv_lora_rank + self.qk_rope_head_dim),) * 2
        return tuple(
            (device_count * 2 * max(1, kv_heads // device_count), head_dim)
            for _, kv_heads, head_dim in self.kv_heads_by_kind
        )


def _row_bytes(numbers: int, dtype: str) -> int:
    return numbers * DTYPE_BYTES[dtype] + (KV_SCALE_BYTES if dtype == "fp8" else 0)


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


_COUNTS = [item.name for item in fields(WeightCounts)]
_FIELDS = {item.name: item for item in (*fields(ModelShape), *fields(WeightCounts)) if item.name != "counts"}
FIELD_NAMES: Mapping[str, str] = {_camel(name): name for name in _FIELDS}
"""The camelCase keys of `from_fields` and their attributes."""

_REQUIRED = ("layers", "hiddenSize", "intermediateSize", "heads", "vocabSize")


def _parse(key: str, value: Any) -> Any:
    """One field of a shape, from YAML or the command line."""
    kind = str(_FIELDS[FIELD_NAMES[key]].type)
    if kind.startswith("str"):
        return str(value)
    if kind == "bool":
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        raise ShapeError(f"shape key {key} is {value!r}, expected true or false")
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit():
        raise ShapeError(f"shape key {key} is {value!r}, expected a whole number that is not negative")
    if len(text) > 12:
        raise ShapeError(f"shape key {key} has {len(text)} digits, expected at most 12")
    return int(text)
