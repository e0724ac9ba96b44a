"""How a checkpoint's matrices are quantised, and their size in memory.

The formats: compressed-tensors (https://github.com/vllm-project/compressed-tensors), DeepSeek's, AutoFP8's and Model
Optimizer's fp8 (arXiv:2412.19437, section 3.3), GPTQ (arXiv:2210.17323), AWQ (arXiv:2306.00978), and floats in small
groups: mxfp8 and mxfp4 (OCP Microscaling Formats, section 5), in which gpt-oss has its experts, and NVFP4
(arXiv:2509.25149, section 2). bitsandbytes looks 4 bits up in a table (NF4, arXiv:2305.14314, section 3; FP4).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, cast

Quantization = Literal["auto", "dense", "int8", "stored"]
QUANTIZATIONS: tuple[Quantization, ...] = ("auto", "dense", "int8", "stored")
"""What the server holds in memory: `dense` weights in the dtype; `int8` with a scale for each output, for products
with 8-bit activations; as they are `stored`; or what is fastest on the device."""

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
TABLE_GROUP = 64
"""Inputs of a scale of NF4 and FP4 in memory."""
_TABLE_SCALE_BYTES = 4
FLOAT_GROUPS = {"mxfp4": 32, "nvfp4": 16, "mxfp8": 32}
"""Inputs of a scale."""

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
        return self.is_float4 and self.group == FLOAT_GROUPS["nvfp4"]

    @property
    def is_mxfp8(self) -> bool:
        """Whether the scales of floats of 8 bits are powers of two, as the bits of an exponent."""
        return self.kind == "float" and self.bits == 8 and self.rows == 1 and self.group == FLOAT_GROUPS["mxfp8"]

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
    if held == "int8" and not (on_cpu and outputs % CPU_COLUMNS):
        return int8_bytes(outputs * inputs, outputs, on_cpu=on_cpu)
    if held == "stored" and form is not None:
        return form.stored_bytes(outputs, inputs, scale_bytes)
    return outputs * inputs * dtype_bytes


def int8_bytes(parameters: int, outputs: int, *, on_cpu: bool) -> int:
    """Of matrices that are held for products of 8-bit integers."""
    return parameters + outputs * (_INT8_BYTES_PER_OUTPUT if on_cpu else 4)


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
_SHOWN = 80  # characters of a pattern


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
            shown = repr(pattern[:_SHOWN])
            if _REPEATED_GROUP.search(_ESCAPED.sub("_", pattern)):
                raise QuantizationError(
                    f"config.json: quantization_config names {shown}, which repeats a group, so that matching it"
                    " may take for ever: name the modules without (…)*, (…)+ or (…){…}"
                )
            try:
                expressions.append(re.compile(pattern.removeprefix("re:")))
            except (re.error, RecursionError, OverflowError) as error:
                raise QuantizationError(f"config.json: quantization_config names {shown}: {error}") from error
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
