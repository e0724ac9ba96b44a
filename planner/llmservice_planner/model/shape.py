"""The shape of a decoder-only model or an encoder, from which its memory and speed are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, asdict, dataclass, fields, replace
from operator import mul
from pathlib import Path
from typing import Any

from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.model.checkpoint import (
    StoredTensor,
    WeightCounts,
    has_head,
    read_tensors,
    refuse_other_formats,
    refuse_quantized,
    refuse_separate_experts,
    stored_dtype,
    weights_bytes,
)
from llmservice_planner.model.config import (
    MOST_LAYERS,
    ShapeError,
    max_seq_length,
    names_dtype,
    patched,
    read_config,
    shape_fields,
)
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

__all__ = ["DTYPE_BYTES", "KV_SCALE_BYTES", "ModelShape", "ShapeError", "weights_bytes"]

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of one element, by the names that `--dtype` and `--kv-dtype` take."""
KV_SCALE_BYTES = 4
"""A float32 scale per key and per value of a head in an fp8 cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of one model. Raises `ShapeError` if they contradict each other."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    architecture: str = "llama"
    max_position_embeddings: int | None = None
    max_seq_length: int | None = None
    """Tokens of an encoder's input where no other maximum is given; None, or more than it knows: all positions."""
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    """Element type of the checkpoint, to which `dtype: auto` resolves."""
    quantization: str | None = None
    """The format of a quantised checkpoint's matrices: a method (fp8, awq, gptq) or a `WeightFormat.code`."""
    sliding_window: int | None = None
    """Tokens that a sliding-window layer attends to, including the current one."""
    sliding_layers: int = 0
    """Number of sliding-window layers; the others attend to all tokens."""
    full_kv_heads: int = 0
    """This and the next: of the layers that attend to all tokens, where they differ from the others; 0: the same."""
    full_head_dim: int = 0
    shared_layers: int = 0
    """Layers that use the keys and values of earlier ones (Gemma 3n and 4)."""
    shared_sliding_layers: int = 0
    """Those of them with a window."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    has_sinks: bool = False
    """A parameter of each head in the softmax (gpt-oss)."""
    norms_per_layer: int = 2
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    """Total width of the shared experts."""
    shared_expert_gate: bool = False
    router_bias: bool = False
    dense_layers: int = 0
    """Layers of a mixture-of-experts model with a dense MLP (the first ones of DeepSeek)."""
    kv_lora_rank: int = 0
    """Width of the latent of multi-head latent attention; 0 for ordinary attention."""
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    encoder_parameters: int = 0
    """All parameters of an encoder, which has no KV cache and no output head; 0: a decoder."""
    quantized_parameters: int = 0
    """This and the following: the `WeightCounts` where they are needed; 0: they have not been read."""
    quantized_outputs: int = 0
    stored_bytes: int = 0
    cpu_stored_bytes: int = 0
    cpu_bytes: int = 0
    cpu_dense_parameters: int = 0
    plain_parameters: int = 0
    plain_outputs: int = 0
    other_parameters: int = 0
    adapted_features: int = 0
    expert_features: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} is {getattr(self, name)}, expected at least 1")
        for kv_heads in (self.kv_heads, self.full_kv_heads or self.kv_heads):
            if self.heads % kv_heads:
                raise ShapeError(f"heads {self.heads} is no multiple of kv_heads {kv_heads}")
        self._check_layers()
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ShapeError(f"dtype {self.dtype} is not known: use float32, bfloat16 or float16")
        if self.quantization:
            try:
                WeightFormat.parse(self.quantization)
            except QuantizationError as error:
                raise ShapeError(str(error)) from error
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ShapeError(f"experts_per_token {self.experts_per_token} must be between 1 and {self.num_experts}")
        if self.num_experts and not self.moe_intermediate_size:
            raise ShapeError("moe_intermediate_size is missing: a mixture of experts needs the width of one expert")
        if self.is_mla and not (self.qk_nope_head_dim and self.qk_rope_head_dim and self.v_head_dim):
            raise ShapeError("kv_lora_rank needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim beside it")

    def _check_layers(self) -> None:
        if self.layers > MOST_LAYERS:
            raise ShapeError(f"layers is {self.layers}, expected at most {MOST_LAYERS}")
        if self.sliding_layers > self.layers or self.dense_layers > self.layers:
            raise ShapeError(f"sliding_layers and dense_layers cannot exceed the {self.layers} layers")
        if min(self._own_layers) < 0 or not any(self._own_layers):
            raise ShapeError(f"shared_layers is {self.shared_layers}, expected fewer than the {self.layers} layers")
        if bool(self.sliding_window) != bool(self.sliding_layers):
            raise ShapeError("sliding_window and sliding_layers go together: give both or neither")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a parsed Hugging Face `config.json`. Raises `ShapeError`."""
        shape = cls(**shape_fields(config))
        if not is_encoder(config):
            return shape
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
        return shape.counted(config, read_tensors(folder)) if shape.wants_headers else shape

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
        )
        head = (self.hidden_size + self.vocab_size) * tied
        counts = replace(counts, adapted_features=counts.adapted_features + head)
        return replace(self, tie_word_embeddings=tied, **asdict(counts))

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
        return cls(**values)

    def to_fields(self) -> dict[str, Any]:
        """The camelCase fields for `from_fields`, without defaults."""
        return {_camel(item.name): getattr(self, item.name) for item in fields(self) if self._differs(item)}

    def _differs(self, item: Field[Any]) -> bool:
        return bool(getattr(self, item.name) != item.default)

    @property
    def why_not_counted(self) -> str | None:
        """Why the weights' bytes have to be read from the files; None: they are counted from the shape."""
        if not self.is_encoder and self.architecture not in FAMILIES and self.counts is None:
            return f"the layout of {self.architecture} is not known"
        return None

    @property
    def wants_headers(self) -> bool:
        """Whether its files' headers say best how large the weights are.

        Transformers' code holds them, or they are quantised, of which checkpoints leave some layers out.
        """
        if self.is_encoder or self.counts is not None:
            return False
        form = None if self.quantization is None else WeightFormat.parse(self.quantization)
        return not self._is_own or (form is not None and not form.is_for_experts)

    @property
    def _is_own(self) -> bool:
        family = FAMILIES.get(self.architecture)
        return family is not None and family.served_architecture is not None

    @property
    def counts(self) -> WeightCounts | None:
        """Of the checkpoint's headers; None: they are not needed, or not read."""
        if not self.other_parameters:
            return None
        return WeightCounts(**{item.name: getattr(self, item.name) for item in fields(WeightCounts)})

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
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.num_experts else 0

    @property
    def num_parameters(self) -> int:
        """All stored parameters including embeddings (a tied head counts once)."""
        if self.is_encoder:
            return self.encoder_parameters
        if (counts := self.counts) is not None:
            return counts.quantized_parameters + counts.plain_parameters + counts.other_parameters
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        norms = self.layers * self.norms_per_layer * self.hidden_size + self.hidden_size
        dense = (self.layers - self.moe_layers) * self._mlp_parameters()
        moe = self.moe_layers * self._moe_parameters()
        return embeddings + norms + self.layers * self._attention_parameters() + dense + moe

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
        """Of all matrices that can be quantised, and their parameters."""
        scale_bytes = DTYPE_BYTES[self.dtype]
        if form is not None and form.method != "compressed-tensors":
            scale_bytes = 4 if form.method == "fp8" else 2
        total = parameters = 0
        for count, outputs, inputs in self._matrices(only_experts=only_experts):
            size = linear_bytes(
                outputs, inputs, form, quantization, on_cpu=on_cpu, dtype_bytes=width, scale_bytes=scale_bytes
            )
            total += count * size
            parameters += count * outputs * inputs
        return total, parameters

    def head_bytes(self, dtype: str, quantization: Quantization, *, on_cpu: bool) -> int:
        width, fits = DTYPE_BYTES[dtype], self.vocab_size % CPU_COLUMNS == 0
        wanted: Quantization = "int8" if quantization == "int8" and fits else "dense"
        return linear_bytes(self.vocab_size, self.hidden_size, None, wanted, on_cpu=on_cpu, dtype_bytes=width)

    def _matrices(self, *, only_experts: bool) -> Iterator[tuple[int, int, int]]:
        """How many there are, with so many outputs and inputs; not the head, routers and an encoder's."""
        if self.is_encoder:
            return
        yield from self._mlp(self.moe_layers * self.num_experts, self.moe_intermediate_size)
        if only_experts:
            return
        if self.is_mla:  # one of several sizes
            yield self.layers, self._mla_parameters() // self.hidden_size, self.hidden_size
        else:
            yield self.layers, (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden_size
            yield self.layers, self.hidden_size, self.heads * self.head_dim
        yield from self._mlp(self.layers - self.moe_layers, self.intermediate_size)
        yield from self._mlp(self.moe_layers, self.shared_expert_intermediate_size)

    def _mlp(self, count: int, width: int) -> Iterator[tuple[int, int, int]]:
        if count and width:
            yield count, 2 * width, self.hidden_size
            yield count, self.hidden_size, width

    def adapter_slot_bytes(self, rank: int, dtype: str, *, experts: bool = False) -> int:
        """A LoRA adapter of that rank on every linear layer, with or without `experts`.

        Each part of a fused matrix has factors of its own; those of an expert's gate and up are one matrix of both.
        """
        features = self.adapted_features or self._adapted_features()
        return rank * (features + self.adapted_expert_features * experts) * DTYPE_BYTES[dtype]

    @property
    def adapted_expert_features(self) -> int:
        """As of `WeightCounts`; 0: there are no experts."""
        if self.counts is not None and not self._is_own:
            return self.expert_features
        return self.moe_layers * self.num_experts * (3 * self.hidden_size + 5 * self.moe_intermediate_size)

    def _adapted_features(self) -> int:
        """As of `WeightCounts`; a tied head is a linear layer too."""
        queries, keys, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden_size
        attention = 4 * hidden + 2 * queries + 2 * keys
        if self.is_mla:
            attention = self._mla_features()
        dense = (self.layers - self.moe_layers) * 3 * (hidden + self.intermediate_size)
        router = hidden + self.num_experts
        shared = 3 * (hidden + self.shared_expert_intermediate_size) * bool(self.shared_expert_intermediate_size)
        moe = self.moe_layers * (router + shared + (hidden + 1) * self.shared_expert_gate)
        return self.layers * attention + dense + moe + hidden + self.vocab_size

    def _mla_features(self) -> int:
        """Without what makes keys and values of latents."""
        queries = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        latents = self.hidden_size + self.kv_lora_rank + self.qk_rope_head_dim
        output = self.heads * self.v_head_dim + self.hidden_size
        return self.hidden_size + 2 * self.q_lora_rank + queries + latents + output

    @property
    def active_parameters(self) -> int:
        """Parameters used for one token: all except the experts that it is not routed to."""
        unused = self.moe_layers * (self.num_experts - self.experts_per_token) * self.expert_parameters
        return max(1, self.num_parameters - unused)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert of one layer."""
        biases = (2 * self.moe_intermediate_size + self.hidden_size) * self.mlp_bias
        return 3 * self.hidden_size * self.moe_intermediate_size + biases

    @property
    def replicated_parameters(self) -> int:
        """Parameters that tensor parallelism replicates on every GPU: norms, routers, MLA's down-projections."""
        per_layer = self.norms_per_layer * self.hidden_size + 2 * self.head_dim * self.qk_norm
        if self.is_mla:
            per_layer += self._mla_down()
        router = self.num_experts * (self.hidden_size + self.router_bias)
        return self.layers * per_layer + self.moe_layers * router + self.hidden_size

    @property
    def kv_heads_by_kind(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Layers with keys and values of their own, KV heads and their width: of all tokens, and of a window."""
        full, sliding = self._own_layers
        of_full = self.full_kv_heads or self.kv_heads, self.full_head_dim or self.head_dim
        return (full, *of_full), (sliding, self.kv_heads, self.head_dim)

    @property
    def _own_layers(self) -> tuple[int, int]:
        sliding = self.sliding_layers - self.shared_sliding_layers
        return self.layers - self.shared_layers - sliding, sliding

    def kv_bytes_per_token(self, dtype: str, device_count: int = 1) -> int:
        """KV-cache bytes of one token over all layers and all `device_count`, with fp8's scales; 0 for an encoder."""
        layers = (layers for layers, *_ in self.kv_heads_by_kind)
        return sum(map(mul, layers, self._layer_bytes(dtype, device_count)))

    @property
    def window_share(self) -> float:
        """Of a token's keys and values, those in layers with a window."""
        full, sliding = (layers * kv_heads * head_dim for layers, kv_heads, head_dim in self.kv_heads_by_kind)
        return sliding / (full + sliding)

    def block_groups(self, block_size: int, step_tokens: int) -> BlockGroups:
        """Of the layers in the server's KV cache, where several with small keys take the place of one."""
        rows = [kv_heads * head_dim for _, kv_heads, head_dim in self.kv_heads_by_kind]
        largest = max(row for row, layers in zip(rows, self._own_layers, strict=True) if layers)
        full, sliding = (
            math.ceil(layers / max(1, largest // row)) for row, layers in zip(rows, self._own_layers, strict=True)
        )
        return BlockGroups.of(block_size, full + sliding, sliding, self.sliding_window, step_tokens)

    def place_bytes(self, dtype: str, device_count: int) -> int:
        """Of a token in a place of the KV cache: in a layer with the largest keys."""
        sizes = self._layer_bytes(dtype, device_count)
        return max(size for size, layers in zip(sizes, self._own_layers, strict=True) if layers)

    def _layer_bytes(self, dtype: str, device_count: int) -> tuple[int, ...]:
        """Of a token in a layer of each of `kv_heads_by_kind`, over all `device_count` GPUs.

        Heads are split over the GPUs, and repeated where there are more GPUs than heads; MLA's latent is on each GPU.
        """
        width, scale_bytes = DTYPE_BYTES[dtype], KV_SCALE_BYTES if dtype == "fp8" else 0
        if self.is_encoder:
            return 0, 0
        if self.is_mla:
            return (device_count * (self.kv_lora_rank + self.qk_rope_head_dim) * width,) * 2
        return tuple(
            device_count * 2 * max(1, kv_heads // device_count) * (head_dim * width + scale_bytes)
            for _, kv_heads, head_dim in self.kv_heads_by_kind
        )

    def _mlp_parameters(self) -> int:
        biases = (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return 3 * self.hidden_size * self.intermediate_size + biases

    def _moe_parameters(self) -> int:
        shared = (
            3 * self.hidden_size * self.shared_expert_intermediate_size + self.hidden_size * self.shared_expert_gate
        )
        router = self.num_experts * (self.hidden_size + self.router_bias)
        return self.num_experts * self.expert_parameters + shared + router

    def _attention_parameters(self) -> int:
        if self.is_mla:
            return self._mla_parameters()
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden_size * (2 * queries + 2 * keys)
        biases = (queries + 2 * keys) * self.qkv_bias + self.hidden_size * self.o_bias
        return weights + biases + 2 * self.head_dim * self.qk_norm + self.heads * self.has_sinks

    def _mla_parameters(self) -> int:
        query_dim = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        queries = (self.q_lora_rank or self.hidden_size) * query_dim
        keys_values = self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + keys_values + self.heads * self.v_head_dim * self.hidden_size + self._mla_down()

    def _mla_down(self) -> int:
        """Parameters of the down-projections to the latents and of their norms."""
        queries = self.hidden_size * self.q_lora_rank + self.q_lora_rank
        return queries + self.hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


FIELD_NAMES: Mapping[str, str] = {_camel(item.name): item.name for item in fields(ModelShape)}
"""The camelCase keys of `from_fields` and their attributes."""

_REQUIRED = ("layers", "hiddenSize", "intermediateSize", "heads", "vocabSize")
_TYPES = {_camel(item.name): item.type for item in fields(ModelShape)}


def _parse(key: str, value: Any) -> Any:
    """One field of a shape, from YAML or the command line."""
    kind = str(_TYPES[key])
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
