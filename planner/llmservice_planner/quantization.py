"""How a checkpoint's matrices are quantised, from the `quantization_config` of its config.json, and their size.

Read are compressed-tensors (https://github.com/vllm-project/compressed-tensors), DeepSeek's, AutoFP8's and Model
Optimizer's fp8 (arXiv:2412.19437, section 3.3), GPTQ (arXiv:2210.17323), AWQ (arXiv:2306.00978), and floats in small
groups: mxfp8 and mxfp4 (OCP Microscaling Formats, section 5), in which gpt-oss has its experts, and NVFP4
(arXiv:2509.25149, section 2). bitsandbytes looks 4 bits up in a table (NF4, arXiv:2305.14314, section 3; FP4).
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, cast

Quantization = Literal["auto", "dense", "int8", "stored"]
QUANTIZATIONS: tuple[Quantization, ...] = ("auto", "dense", "int8", "stored")
"""What the server holds in memory: `dense` weights in the dtype; `int8` with a scale for each output, for products
with 8-bit activations; as they are `stored`; or what is fastest on the device."""

SUPPORTED = (
    "compressed-tensors (8-bit integers, fp8, 4-bit integers, mxfp8, mxfp4, NVFP4), fp8 (one scale, or blocks), "
    "gptq (4 or 8 bits), awq (4 bits, gemm), auto-round (as gptq, awq, fp8, mxfp8, mxfp4, NVFP4), "
    "modelopt (fp8, mxfp8, NVFP4), bitsandbytes (8-bit integers, NF4, FP4), mxfp4 (the experts of gpt-oss)"
)
ABSMAX = "weight.absmax"
"""Of a matrix of NF4 or FP4, whose bytes may be stored as elements of any dtype."""
SUFFIXES = frozenset({
    *("weight", "weight_packed", "weight_shape", "weight_scale", "weight_scale_inv", "weight_zero_point"),
    *("weight_g_idx", "weight_global_scale", "weight_scale_2", "input_scale", "input_global_scale"),
    *("activation_scale", "qweight", "qzeros", "scales", "g_idx"),
    *("SCB", "weight_format", ABSMAX, "weight.quant_map"),
    *("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"),
    *("weight.nested_absmax", "weight.nested_quant_map"),
})  # fmt: skip
"""Of the tensors of one matrix in a checkpoint, besides its bias."""
_IN_WEIGHT = ".weight."
"""Before the last part of a suffix that has several."""
CPU_COLUMNS = 64  # the server's products with quantised weights compute so many outputs at a time on a CPU
_INT8_BYTES_PER_OUTPUT = 8  # a float32 scale, and what the zero of the activations adds to its sums
_NVFP4_BYTES_PER_OUTPUT = 8  # the matrix's scale in float64
_TABLE_GROUP, _TABLE_SCALE_BYTES = 64, 4
_DENSE_BITS = 16
_BEFORE_LAYERS = re.compile(r"^(model\.)?((language|text)_model\.)?(model\.)?")
"""Of a name, which is another one where the language model is loaded alone."""
SIDECAR = "hf_quant_config.json"
_FLOAT_GROUPS = {"mxfp4": 32, "nvfp4": 16, "mxfp8": 32}

WeightKind = Literal["int", "float", "nf", "fp"]
"""The last two are looked up in a table that the checkpoint has (NF4 and FP4 of bitsandbytes)."""


class QuantizationError(ValueError):
    """A `quantization_config` that cannot be read, or of a format that the server does not run."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of one matrix `[out, in]`: a scale for each `rows` outputs and `group` inputs; None: for all."""

    method: str
    bits: int
    kind: WeightKind = "int"
    rows: int | None = 1
    group: int | None = None
    symmetric: bool = True
    activations: Literal["int8", "fp8"] | None = None
    static: bool = False
    """Whether the checkpoint has the scale of the activations."""
    version: int = 2
    """Of GPTQ: in 1 the zeros are stored less one."""
    reordered: bool = False
    """Whether a group's inputs are not adjacent (GPTQ's `desc_act`)."""

    def __str__(self) -> str:
        name = f"{'fp' if self.kind == 'float' else self.kind}{self.bits}"
        size = "" if self.group is None else f", {'groups' if self.rows == 1 else 'blocks'} of {self.group}"
        activations = "" if self.activations is None else f", {self.activations} activations"
        return f"{self.method} ({name}{size}{activations})"

    @property
    def code(self) -> str:
        """Of a model's shape, from which `parse` makes the format: `awq/int4/1x128/zeros`."""
        size = "tensor" if self.rows is None else None if self.group is None else f"{self.rows}x{self.group}"
        parts = self.method, f"{self.kind}{self.bits}", size, None if self.symmetric else "zeros"
        activations = self.activations and f"{self.activations}-activations"
        return "/".join(part for part in (*parts, activations, "reordered" if self.reordered else None) if part)

    @classmethod
    def parse(cls, code: str) -> WeightFormat:
        """Of a `code`, or of a method alone with its usual format. Raises `QuantizationError`."""
        code = _USUAL.get(code, code)
        match = _CODE.fullmatch(code)
        if match is None:
            raise QuantizationError(
                f"quantization is {code!r}, expected one of {', '.join(_USUAL)}, or as in {_USUAL['awq']}"
            )
        group, activations = match["group"], match["activations"]
        return cls(
            match["method"],
            int(match["bits"]),
            cast("WeightKind", match["kind"]),
            None if match["tensor"] else int(match["rows"] or 1),
            None if group is None else int(group),
            symmetric=match["zeros"] is None,
            activations="int8" if activations == "int8" else "fp8" if activations else None,
            reordered=match["reordered"] is not None,
        )

    @property
    def is_for_experts(self) -> bool:
        """Whether all matrices but the experts' are dense."""
        return self.method == "mxfp4"

    @property
    def is_float4(self) -> bool:
        return self.kind == "float" and self.bits == 4

    @property
    def is_table(self) -> bool:
        return self.kind in ("nf", "fp")

    @property
    def is_nvfp4(self) -> bool:
        """Whether the scales are floats of 8 bits, which one of the matrix scales again; else powers of two (mxfp4)."""
        return self.is_float4 and self.group == _FLOAT_GROUPS["nvfp4"]

    @property
    def is_mxfp8(self) -> bool:
        """Whether the scales of floats of 8 bits are powers of two, as the bits of an exponent."""
        return self.kind == "float" and self.bits == 8 and self.rows == 1 and self.group == _FLOAT_GROUPS["mxfp8"]

    def shape_of(self, suffix: str, stored: tuple[int, int], hidden_size: int) -> tuple[int, int]:
        """`[out, in]` of a matrix from its tensor of that suffix (weight, weight_packed, qweight) and shape.

        Of NF4 and FP4 only their product is known, from a tensor of bytes: one of them is taken for the model's
        `hidden_size`, the inputs.
        """
        rows, columns = stored
        if self.is_table:
            return 2 * rows * columns // hidden_size, hidden_size
        packing = 32 // self.bits
        if self.is_float4:  # two in a byte
            return rows, 2 * columns
        if suffix == "weight":
            return rows, columns
        if suffix == "weight_packed":
            return rows, columns * packing
        return (columns * packing, rows) if self.method == "awq" else (columns, rows * packing)

    def stored_bytes(self, outputs: int, inputs: int, scale_bytes: int = 2) -> int:
        """Of a matrix that the server holds as it is stored; `scale_bytes`: of a scale."""
        groups = 1 if self.group is None else math.ceil(inputs / self.group)
        scales = math.ceil(outputs / (self.rows or 1)) * groups
        order = 4 * inputs if self.reordered else 0
        if self.is_float4:
            scale_bytes, order = 1, outputs * _NVFP4_BYTES_PER_OUTPUT if self.is_nvfp4 else 0
        if self.is_table:
            scale_bytes = _TABLE_SCALE_BYTES
        return outputs * inputs * self.bits // 8 + scales * (scale_bytes + (not self.symmetric)) + order

    @property
    def is_int8_product(self) -> bool:
        """Whether it is made for products of 8-bit integers."""
        return self.bits == 8 and self.activations == "int8" and self.group is None and self.symmetric

    @property
    def is_fp8_product(self) -> bool:
        """Whether it is made for products of 8-bit floats, that a GPU computes with a scale for each output."""
        return self.activations == "fp8" and self.group is None

    def held_as(self, wanted: Quantization, *, on_cpu: bool, outputs: int = 0) -> Quantization:
        """`wanted`, or what the server chooses on the device: `dense`, `int8` or `stored`.

        A CPU has fast products of 4-bit integers and floats and, with AVX-512 VNNI, of 8-bit integers that were made
        for them, if the `outputs` are a multiple of its columns.
        """
        fits = outputs % CPU_COLUMNS == 0
        if on_cpu and fits and wanted in ("auto", "stored") and self.is_int8_product:
            return "int8"
        if wanted == "auto":
            return "dense" if on_cpu and (self.bits > 4 or self.is_table or not fits) else "stored"
        return wanted


def linear_bytes(
    outputs: int,
    inputs: int,
    form: WeightFormat | None,
    wanted: Quantization,
    *,
    on_cpu: bool,
    dtype_bytes: int,
    scale_bytes: int = 2,
) -> int:
    """Of a matrix `[out, in]` of a checkpoint in the server's memory; `form`: None, it is not quantised."""
    held = wanted if form is None else form.held_as(wanted, on_cpu=on_cpu, outputs=outputs)
    if held == "int8":
        return int8_bytes(outputs * inputs, outputs, on_cpu=on_cpu)
    if held == "stored" and form is not None:
        return form.stored_bytes(outputs, inputs, scale_bytes)
    return outputs * inputs * dtype_bytes


def int8_bytes(parameters: int, outputs: int, *, on_cpu: bool) -> int:
    """Of matrices that are held for products of 8-bit integers."""
    return parameters + outputs * (_INT8_BYTES_PER_OUTPUT if on_cpu else 4)


def with_sidecar(config: dict[str, Any], sidecar: Mapping[str, Any] | None) -> dict[str, Any]:
    """config.json, and what older checkpoints of Model Optimizer say of their weights in a file of its own."""
    quantization = (sidecar or {}).get("quantization")
    if config.get("quantization_config") or not isinstance(quantization, Mapping):
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **quantization}}


def module_and_suffix(name: str) -> tuple[str, str]:
    """A tensor's name in two parts, of which the second is one of `SUFFIXES` if the matrix is quantised."""
    module, mark, rest = name.partition(_IN_WEIGHT)
    if mark and f"weight.{rest}" in SUFFIXES:
        return module, f"weight.{rest}"
    module, _, suffix = name.rpartition(".")
    return module, suffix


def is_quantized(suffixes: Iterable[str]) -> bool:
    """Whether a matrix of these tensors is quantised, whatever config.json says: formats leave some matrices out.

    That of fp8 and int8 is also quantised where it has no other tensor than its weight, as the dtype says.
    """
    return bool(SUFFIXES.intersection(suffixes) - {"weight"})


_CODE = re.compile(
    r"(?P<method>[a-z0-9-]+)/(?P<kind>int|float|nf|fp)(?P<bits>4|8)(/(?P<tensor>tensor)|/(?P<rows>\d{1,6})x(?P<group>\d{1,6}))?"
    r"(?P<zeros>/zeros)?(/(?P<activations>int8|fp8)-activations)?(?P<reordered>/reordered)?"
)
_USUAL = {
    "awq": "awq/int4/1x128/zeros",
    "gptq": "gptq/int4/1x128",
    "fp8": "fp8/float8/128x128/fp8-activations",
    "compressed-tensors": "compressed-tensors/int8/int8-activations",
    "mxfp4": "mxfp4/float4/1x32",
    "nvfp4": "modelopt/float4/1x16",
    "mxfp8": "modelopt/float8/1x32",
    "bitsandbytes": "bitsandbytes/nf4/1x64",
}


_ESCAPED = re.compile(r"\\.|\[\^?\]?[^]]*\]")
"""Characters and sets of them, in a pattern."""
_REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
"""Matching may take exponential time, and the operator matches the patterns of any checkpoint."""


@dataclass(frozen=True, slots=True)
class _Modules:
    """Those that some names and patterns mean: checkpoints have tens of thousands of either."""

    names: frozenset[str]
    """Of a module, or of successive parts of its name."""
    expressions: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, patterns: Iterable[str]) -> _Modules:
        """Raises `QuantizationError`."""
        names, expressions = set[str](), []
        for pattern in patterns:
            if not pattern.startswith("re:"):
                names.add(pattern)
                continue
            if _REPEATED_GROUP.search(_ESCAPED.sub("_", pattern)):
                raise QuantizationError(
                    f"config.json: quantization_config names {pattern!r}, which repeats a group, so that matching it"
                    " may take for ever: name the modules without (…)*, (…)+ or (…){…}"
                )
            try:
                expressions.append(re.compile(pattern.removeprefix("re:")))
            except re.error as error:
                raise QuantizationError(f"config.json: quantization_config names {pattern!r}: {error}") from error
        return cls(frozenset(names), tuple(expressions))

    def __contains__(self, module: str) -> bool:
        return self.has_name_of(module) or self.has_expression_of(module)

    def has_name_of(self, module: str) -> bool:
        parts = module.split(".")
        ends = ((first, end) for first in range(len(parts)) for end in range(first + 1, len(parts) + 1))
        return any(".".join(parts[first:end]) in self.names for first, end in ends)

    def has_expression_of(self, module: str) -> bool:
        return any(expression.match(module) for expression in self.expressions)


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Which format each matrix has."""

    formats: tuple[tuple[tuple[str, ...], WeightFormat], ...]
    """Names, `re:` patterns, or `Linear` for all, and the format of these. Of several that match, names go before
    patterns and these before `Linear`, as in compressed-tensors, and then the first."""
    ignored: tuple[str, ...] = ()
    _targets: tuple[_Modules, ...] = field(init=False, repr=False, compare=False)
    _left_out: _Modules = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_targets", tuple(_Modules.of(targets) for targets, _ in self.formats))
        object.__setattr__(self, "_left_out", _Modules.of(self.ignored))

    @property
    def main(self) -> WeightFormat:
        """The format that stands for all where one has to: that of what is not named, else the one of fewest bits."""
        forms = [form for targets, form in self.formats if "Linear" in targets]
        return forms[0] if forms else min((form for _, form in self.formats), key=lambda form: form.bits)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> QuantizationConfig | None:
        """From a parsed config.json; None if the checkpoint is not quantised. Raises `QuantizationError`."""
        of_mlx = config.get("quantization")  # the only key of its older checkpoints; later ones repeat it
        raw = config.get("quantization_config", config.get("compression_config")) or of_mlx
        if not raw:
            return None
        if not isinstance(raw, Mapping):
            raise QuantizationError(f"config.json: quantization_config is {raw!r}, expected an object")
        method = raw.get("quant_method", "mlx" if of_mlx else None)
        if method == "mxfp4" and config.get("model_type") == "gpt_oss":
            return cls(((("experts",), WeightFormat("mxfp4", 4, "float", group=32)),))
        parse = _PARSERS.get(str(method))
        if parse is None:
            raise QuantizationError(
                f"config.json: the checkpoint is quantised by {method!r}, supported are {SUPPORTED}: "
                "choose such a checkpoint, or the unquantised one"
            )
        return parse(raw)

    def format_of(self, module: str) -> WeightFormat | None:
        """The format of the matrix of a module, by its name in the checkpoint; None: it is not quantised."""
        if module in self._left_out:
            return None
        targets = [(modules, form) for modules, (_, form) in zip(self._targets, self.formats, strict=True)]
        ranked = chain(
            (form for modules, form in targets if modules.has_name_of(module)),
            (form for modules, form in targets if modules.has_expression_of(module)),
            (form for modules, form in targets if "Linear" in modules.names),
        )
        return next(ranked, None)

    def __str__(self) -> str:
        return "; ".join(str(form) for _, form in self.formats)


def _names(raw: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    for key in keys:
        value = raw.get(key)
        if value:
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise QuantizationError(
                    f"config.json: quantization_config.{key} is {value!r}, expected a list of names"
                )
            return tuple(value)
    return ()


def _number(raw: Mapping[str, Any], key: str, expected: tuple[int, ...] | None = None) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or (expected is not None and value not in expected):
        wanted = "a whole number" if expected is None else " or ".join(map(str, expected))
        raise QuantizationError(f"config.json: quantization_config.{key} is {value!r}, expected {wanted}")
    return value


def _group(size: int) -> int | None:
    if size == -1:
        return None
    if size < 1 or size % 8:
        raise QuantizationError(
            f"config.json: quantization_config.group_size is {size}, expected a multiple of 8, or -1"
        )
    return size


def _block(value: Any) -> tuple[int, int]:
    good = isinstance(value, list) and len(value) == 2 and all(type(size) is int and size >= 1 for size in value)
    if not good:
        raise QuantizationError(
            f"config.json: quantization_config has blocks of {value!r}, expected two sizes such as [128, 128]"
        )
    return value[0], value[1]


def _gptq(raw: Mapping[str, Any]) -> QuantizationConfig:
    rules = raw.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(each, Mapping) for each in rules.values()):
        raise QuantizationError("config.json: quantization_config.dynamic is no object of objects")
    if raw.get("rotation"):  # of GPTQModel, whose down projections take inputs times a Hadamard matrix
        raise QuantizationError(
            f"config.json: quantization_config.rotation is {raw['rotation']!r}: rotated activations are not supported"
        )
    version = raw.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise QuantizationError(
            f"config.json: quantization_config.checkpoint_format is {version!r}, expected gptq or gptq_v2"
        )
    form = WeightFormat(
        "gptq",
        _number(raw, "bits", (4, 8)),
        group=_group(_number(raw, "group_size")),
        symmetric=bool(raw.get("sym", True)),
        version=2 if version == "gptq_v2" else 1,
        reordered=bool(raw.get("desc_act")),
    )
    ignored = [f"re:{rule.removeprefix('-:')}" for rule in rules if rule.startswith("-:")]
    others = [
        ((f"re:{rule.removeprefix('+:')}",), _gptq({**raw, "dynamic": None, **settings}).main)
        for rule, settings in rules.items()
        if not rule.startswith("-:")
    ]
    formats = *others, (("Linear",), form)
    return QuantizationConfig(formats, (*ignored, *(() if raw.get("lm_head") else ("lm_head",))))


def _awq(raw: Mapping[str, Any]) -> QuantizationConfig:
    version = str(raw.get("version", "gemm")).lower()
    if version != "gemm":
        raise QuantizationError(f"config.json: quantization_config.version is {version!r}, expected gemm")
    key = "w_bit" if "bits" not in raw else "bits"
    group = _group(_number(raw, "q_group_size" if "group_size" not in raw else "group_size"))
    form = WeightFormat("awq", _number(raw, key, (4,)), group=group, symmetric=False)
    return QuantizationConfig(((("Linear",), form),), ("lm_head", *_names(raw, "modules_to_not_convert")))


def _bitsandbytes(raw: Mapping[str, Any]) -> QuantizationConfig:
    form = WeightFormat("bitsandbytes", 8)
    if raw.get("load_in_4bit") or raw.get("_load_in_4bit"):
        stated = raw.get("bnb_4bit_quant_type", "fp4")
        if stated not in ("nf4", "fp4"):
            raise QuantizationError(
                f"config.json: quantization_config.bnb_4bit_quant_type is {stated!r}, expected nf4 or fp4"
            )
        form = WeightFormat("bitsandbytes", 4, "nf" if stated == "nf4" else "fp", group=_TABLE_GROUP)
    return QuantizationConfig(((("Linear",), form),), _names(raw, "llm_int8_skip_modules") or ("lm_head",))


_ZEROS_AS_THEY_ARE = {"auto_round", "auto_round:exllamav2", "auto_round:gptqmodel"}


def _auto_round(raw: Mapping[str, Any]) -> QuantizationConfig:
    """AutoRound (arXiv:2309.05516), whose tensors are those of other methods."""
    layers = raw.get("extra_config") or {}
    if not isinstance(layers, Mapping) or not all(isinstance(each, Mapping) for each in layers.values()):
        raise QuantizationError("config.json: quantization_config.extra_config is no object of objects")
    others = {name: each for name, each in layers.items() if each.get("bits", raw.get("bits")) != _DENSE_BITS}
    formats = [
        ((f"re:{name}" if set(name) & set("*^$[(|\\") else name,), _auto_round_layers({**raw, **settings}).main)
        for name, settings in others.items()
    ]
    usual = _auto_round_layers({**raw, "lm_head": "lm_head" in others})
    return replace(usual, formats=(*formats, *usual.formats))


def _auto_round_layers(raw: Mapping[str, Any]) -> QuantizationConfig:
    """Integers are stored as by GPTQ, of either version, or AWQ; floats as by compressed-tensors, blocks as by fp8."""
    kind = str(raw.get("data_type", "int"))
    if kind == "int":
        packing = str(raw.get("packing_format") or raw.get("backend") or "auto_round:auto_gptq")
        version = "gptq_v2" if packing in _ZEROS_AS_THEY_ARE else "gptq"
        return (_awq if "awq" in packing else _gptq)({**raw, "version": "gemm", "checkpoint_format": version})
    bits = _number(raw, "bits")
    if group := _FLOAT_GROUPS.get(f"{kind[:2]}{kind[3:5]}{bits}"):  # mx_fp and nv_fp
        form = WeightFormat("compressed-tensors", bits, "float", group=_number(raw, "group_size", (group,)))
    elif kind.startswith("fp") and bits == 8 and raw.get("weight_block_size"):
        return _fp8(raw)
    elif kind.startswith("fp") and bits == 8:
        rows = 1 if _number(raw, "group_size", (-1, 0)) else None
        rounds, static = raw.get("act_bits", _DENSE_BITS) == 8, not raw.get("act_dynamic", True)
        form = WeightFormat(
            "compressed-tensors", 8, "float", rows, activations="fp8" if rounds else None, static=rounds and static
        )
    else:
        raise QuantizationError(
            f"config.json: quantization_config.data_type is {kind!r} in {bits} bits, expected int in 4 or 8, fp in 8, "
            "mx_fp in 4 or 8, or nv_fp in 4"
        )
    return QuantizationConfig(((("Linear",), form),), () if raw.get("lm_head") else ("lm_head",))


def _fp8(raw: Mapping[str, Any]) -> QuantizationConfig:
    if raw.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise QuantizationError(f"config.json: quantization_config.fmt is {raw['fmt']!r}, expected e4m3")
    if semantics := raw.get("weight_scale_semantics"):  # of GPTQModel, whose weight_scale_inv is what divides
        raise QuantizationError(
            f"config.json: quantization_config.weight_scale_semantics is {semantics!r}, supported are scales that "
            "multiply, without that key"
        )
    rows, group = None, None
    if raw.get("weight_block_size") is not None:
        rows, group = _block(raw["weight_block_size"])
    static = raw.get("activation_scheme", "dynamic") == "static"
    form = WeightFormat("fp8", 8, "float", rows, group, activations="fp8", static=static)
    left_out = _names(raw, "modules_to_not_convert", "ignored_layers") or ("lm_head",)
    return QuantizationConfig(((("Linear",), form),), left_out)


_NVFP4 = WeightFormat("modelopt", 4, "float", group=_FLOAT_GROUPS["nvfp4"])
"""The group is not always stated, and sometimes another method's."""
_MODELOPT = {
    "FP8": WeightFormat("fp8", 8, "float", None, activations="fp8", static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat("fp8", 8, "float", activations="fp8"),
    "FP8_PB": WeightFormat("fp8", 8, "float", 128, 128, activations="fp8"),
    "FP8_PB_WO": WeightFormat("fp8", 8, "float", 128, 128),
    "MXFP8": WeightFormat("modelopt", 8, "float", group=_FLOAT_GROUPS["mxfp8"]),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}


def _modelopt(raw: Mapping[str, Any]) -> QuantizationConfig:
    ignored = tuple(
        f"re:{fnmatch.translate(each)}" if "*" in each else each for each in _names(raw, "ignore", "exclude_modules")
    )
    layers = raw.get("quantized_layers")
    if raw.get("quant_algo") != "MIXED_PRECISION" or not isinstance(layers, Mapping) or not layers:
        return QuantizationConfig(((("Linear",), _modelopt_format(raw)),), ignored)
    formats: dict[WeightFormat, list[str]] = {}
    for name, settings in layers.items():
        formats.setdefault(_modelopt_format(settings), []).append(_BEFORE_LAYERS.sub("", name))
    return QuantizationConfig(tuple((tuple(names), form) for form, names in formats.items()), ignored)


def _modelopt_format(raw: Any) -> WeightFormat:
    algorithm = raw.get("quant_algo") if isinstance(raw, Mapping) else raw
    form = _MODELOPT.get(str(algorithm).upper())
    if form is None:
        raise QuantizationError(
            f"config.json: quantization_config.quant_algo is {algorithm!r}, expected one of {', '.join(_MODELOPT)}, or "
            "MIXED_PRECISION with quantized_layers of these"
        )
    return form


_COMPRESSED_FLOATS = {
    f"{kind}-{'' if kind == 'mxfp8' else 'pack-'}quantized": (8 if kind == "mxfp8" else 4, group)
    for kind, group in _FLOAT_GROUPS.items()
}
"""Bits and inputs of a group."""
_COMPRESSED = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", *_COMPRESSED_FLOATS)


def _compressed_tensors(raw: Mapping[str, Any]) -> QuantizationConfig | None:
    """None where only the KV cache or attention is quantised, as ours is not."""
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping):
        raise QuantizationError("config.json: quantization_config has no config_groups")
    sparsity = raw.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise QuantizationError(
            f"config.json: quantization_config.sparsity_config.format is {sparsity['format']!r}, expected dense"
        )
    if not _is_in_weights(raw.get("transform_config")):
        raise QuantizationError("config.json: quantization_config.transform_config rotates activations: not supported")
    formats = []
    for name, group in groups.items():
        if isinstance(group, Mapping) and "weights" in group and group["weights"] is None:
            continue  # of attention
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise QuantizationError(f"config.json: quantization_config.config_groups.{name} has no weights")
        stored = group.get("format") or raw.get("format")
        if stored not in (*_COMPRESSED, "mixed-precision"):
            raise QuantizationError(
                f"config.json: quantization_config.format is {stored!r}, expected one of {', '.join(_COMPRESSED)}"
            )
        formats.append((_names(group, "targets") or ("Linear",), _compressed_format(group, stored)))
    return QuantizationConfig(tuple(formats), _names(raw, "ignore")) if formats else None


def _is_in_weights(transforms: Any) -> bool:
    """Whether all rotations are of weights, of which a checkpoint has the rotated ones (SpinQuant's R1 and R2)."""
    if not transforms:
        return True
    try:
        schemes = transforms["config_groups"].values()
        return all(each["location"] in ("weight_input", "weight_output") for one in schemes for each in one["apply"])
    except (KeyError, TypeError, AttributeError):
        return False


def _compressed_format(group: Mapping[str, Any], stored: str) -> WeightFormat:
    weights, inputs = group["weights"], group.get("input_activations")
    if stored in _COMPRESSED_FLOATS:  # activations are multiplied as they are, even if it was made to round them
        bits, inputs_of_scale = _COMPRESSED_FLOATS[stored]
        expected = _number(weights, "group_size", (inputs_of_scale,))
        return WeightFormat("compressed-tensors", bits, "float", group=expected)
    kind, bits = weights.get("type", "int"), _number(weights, "num_bits", (4, 8))
    if kind not in ("int", "float") or (kind == "float" and bits != 8):
        raise QuantizationError(
            f"the checkpoint has weights of type {kind!r} in {bits} bits, supported are {SUPPORTED}"
        )
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    rows, size = 1, None
    if strategy == "group":
        size = _group(_number(weights, "group_size"))
    elif strategy == "block":
        rows, size = _block(weights.get("block_structure"))
    elif strategy not in ("channel", "tensor"):
        raise QuantizationError(
            f"config.json: weights are quantised by the strategy {strategy!r}, expected tensor, channel, group or block"
        )
    activations: Literal["int8", "fp8"] | None = None
    static = False
    if inputs:
        if not isinstance(inputs, Mapping):
            raise QuantizationError(f"config.json: input_activations are {inputs!r}, expected an object")
        found = inputs.get("type", "int"), inputs.get("num_bits"), bool(inputs.get("symmetric", True))
        accepted = [(kind, 8, True)] + [("float", 8, True)] * (bits == 4)
        if found not in accepted:
            raise QuantizationError(
                f"config.json: activations are {'' if found[2] else 'asymmetric '}{found[0]} of {found[1]} bits, "
                f"expected symmetric {kind} of 8 bits, or none"
            )
        if found[0] == kind:  # floats beside 4 bits are multiplied as they are
            activations, static = "int8" if kind == "int" else "fp8", not inputs.get("dynamic")
    return WeightFormat(
        "compressed-tensors",
        bits,
        "float" if kind == "float" else "int",
        None if strategy == "tensor" else rows,
        size,
        symmetric=bool(weights.get("symmetric", True)),
        activations=activations,
        static=static,
        reordered=weights.get("actorder") in ("group", "dynamic", True),  # the second is another name of the first
    )


_PARSERS: dict[str, Callable[[Mapping[str, Any]], QuantizationConfig | None]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,  # of its first versions
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}
