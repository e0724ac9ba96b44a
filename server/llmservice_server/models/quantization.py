"""From a checkpoint's tensors of one quantised matrix to a `QuantizedWeight`.

The library `compressed-tensors` reads one of these formats only, and importing it takes as long as the rest of the
start (5 s), because it imports transformers; the tests compare with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from llmservice_planner.model.quantization import WeightFormat
from llmservice_server.backend.quantized import INT8_MAX, QuantizedWeight
from llmservice_server.types.errors import ModelLoadError

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the eight numbers of an int32 are: AWQ stores the columns 0 2 4 6 1 3 5 7, the first lowest."""


def read(form: WeightFormat, name: str, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> QuantizedWeight:
    """The matrix `name` of shape `[out, in]`. `tensors`: by their names after the matrix's.

    Raises `ModelLoadError` for a tensor that is missing or of another shape or dtype than the format's.
    """
    others = _read_float4 if form.is_float4 else _read_values
    read_format = {"gptq": _read_gptq, "awq": _read_awq, "bitsandbytes": _read_bitsandbytes}.get(form.method, others)
    return read_format(form, _Tensors(form, name, tensors), shape)


def shape_of(form: WeightFormat, name: str, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """`[out, in]` of the matrix `name`, where only its tensors say it. Raises `ModelLoadError` if they do not."""
    if (kept := tensors.get("weight_shape")) is not None and kept.numel() == 2:
        outputs, inputs = kept.tolist()
        return outputs, inputs
    if form.is_table:
        return _Tensors(form, name, tensors).state().shape
    suffix = next((each for each in ("qweight", "weight_packed") if each in tensors), "weight")
    values = tensors.get(suffix)
    if values is None or values.ndim != 2:
        raise ModelLoadError(f"{name}: its tensors ({', '.join(sorted(tensors))}) are not those of a matrix in {form}")
    return form.shape_of(suffix, (values.shape[0], values.shape[1]), 0)


class _TableState(msgspec.Struct):
    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int = 0
    nested_offset: float = 0.0


class _Tensors:
    """The tensors of one matrix, checked when they are taken."""

    def __init__(self, form: WeightFormat, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self._form, self._name, self._tensors = form, name, tensors

    def __contains__(self, suffix: str) -> bool:
        return suffix in self._tensors

    def take(
        self, suffix: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (torch.int32,)
    ) -> torch.Tensor:
        if suffix not in self._tensors:
            raise ModelLoadError(
                f"the checkpoint has no {self._name}.{suffix}, which {self._form} needs: it has "
                f"{', '.join(sorted(self._tensors)) or 'none of its tensors'}"
            )
        tensor = self._tensors[suffix]
        if _without_ones(tensor.shape) != _without_ones(shape):
            raise ModelLoadError(
                f"{self._name}.{suffix} has the shape {list(tensor.shape)}, {self._form} makes it {list(shape)}"
            )
        if tensor.dtype not in dtypes:
            expected = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise ModelLoadError(f"{self._name}.{suffix} is {tensor.dtype}, {self._form} makes it {expected}")
        return tensor.reshape(shape)

    def take_bytes(self, suffix: str, count: int) -> torch.Tensor:
        """Bytes that may be stored as elements of another dtype (`bnb_4bit_quant_storage`)."""
        size = self._tensors[suffix].itemsize if suffix in self else 1
        return self.take(suffix, (count // size, 1), (torch.uint8, torch.int8, *_FLOATS)).contiguous().view(torch.uint8)

    def state(self) -> _TableState:
        """What bitsandbytes says of a matrix of NF4 or FP4, in JSON."""
        suffix = f"weight.quant_state.bitsandbytes__{self._form.kind}{self._form.bits}"
        if suffix not in self:
            raise self.fail(f"it has no {suffix}")
        try:
            return msgspec.json.decode(
                bytes(self._tensors[suffix].flatten().view(torch.uint8).tolist()), type=_TableState
            )
        except msgspec.DecodeError as error:
            raise self.fail(f"{suffix} is not as expected: {error}") from error

    def fail(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self._name}: {problem} ({self._form})")


def _without_ones(shape: Sequence[int]) -> list[int]:
    """Sizes that count: methods differ in whether they keep dimensions of one."""
    return [size for size in shape if size != 1]


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_E4M3_NAN = 0x7F


def _groups(form: WeightFormat, inputs: int, tensors: _Tensors) -> int:
    if form.group is None:
        return 1
    if form.rows == 1 and inputs % form.group:
        raise tensors.fail(f"its {inputs} inputs are no multiple of a group's {form.group}")
    return -(-inputs // form.group)


def _read_values(form: WeightFormat, tensors: _Tensors, shape: tuple[int, int]) -> QuantizedWeight:
    """compressed-tensors, fp8, and mxfp8."""
    outputs, inputs = shape
    groups = _groups(form, inputs, tensors)
    scale_name = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
    zeros = order = None
    if "weight_packed" in tensors:
        width = -(-inputs * form.bits // 32)
        stored = tensors.take("weight_packed", (outputs, width)).contiguous().view(torch.uint8)
        values = stored if form.bits == 4 else (stored ^ 128).view(torch.int8)  # 4 bits: two in a byte, lowest first
        values = values[:, : inputs * form.bits // 8]
        if not form.symmetric:
            height = -(-outputs * form.bits // 32)
            packed = tensors.take("weight_zero_point", (height, groups))
            zeros = _unpacked(packed, form.bits, 0)[:outputs] - (1 << (form.bits - 1))
    else:
        dtype = torch.float8_e4m3fn if form.kind == "float" else torch.int8
        values = tensors.take("weight", shape, (dtype,))
        if form.bits == 4:
            values = _packed_nibbles(values)
        if not form.symmetric:
            zeros = tensors.take("weight_zero_point", (outputs, groups), (torch.int8,))
    rows = form.rows or 1
    if form.rows is None:
        scales = tensors.take(scale_name, (1, 1), _FLOATS).expand(outputs, 1)
    else:
        bits = (torch.uint8,) if form.is_mxfp8 else ()
        scales = tensors.take(scale_name, (-(-outputs // rows), groups), (*_FLOATS, torch.float8_e8m0fnu, *bits))
        if scales.itemsize == 1:  # powers of two
            scales = scales.view(torch.float8_e8m0fnu).float().bfloat16()
    if form.reordered:
        order, values = _sorted(tensors.take("weight_g_idx", (inputs,)), values, form, tensors)
    input_scale = None
    if form.static and form.activations == "fp8":  # of integers each row gets its own scale, which is more exact
        name = "activation_scale" if "activation_scale" in tensors else "input_scale"  # Mistral's name, and all others'
        input_scale = tensors.take(name, (1,), _FLOATS).float()
    return QuantizedWeight(
        values.contiguous(),
        scales.contiguous(),
        None if zeros is None else zeros.to(torch.int8).contiguous(),
        rows,
        form.group,
        order,
        form.activations,
        input_scale,
    )


def _read_float4(form: WeightFormat, tensors: _Tensors, shape: tuple[int, int]) -> QuantizedWeight:
    """mxfp4 and NVFP4, whose scales are divided by compressed-tensors' scale of the matrix, or times Model Optimizer's.

    A byte has the numbers of two inputs, the first lowest.
    """
    outputs, inputs = shape
    groups = _groups(form, inputs, tensors)
    name = "weight_packed" if "weight_packed" in tensors else "weight"
    values = tensors.take(name, (outputs, inputs // 2), (torch.uint8,))
    if not form.is_nvfp4:
        powers = tensors.take("weight_scale", (outputs, groups), (torch.uint8, torch.float8_e8m0fnu))
        return QuantizedWeight(values.contiguous(), powers.contiguous().view(torch.float8_e8m0fnu), group=form.group)
    scales = tensors.take("weight_scale", (outputs, groups), (torch.float8_e4m3fn,))
    if form.method == "modelopt":
        whole = tensors.take("weight_scale_2", (1, 1), (torch.float32,)).double()
    else:
        whole = 1 / tensors.take("weight_global_scale", (1, 1), (torch.float32,)).double()
    bits = scales.contiguous().view(torch.int8)
    if not 0 <= whole < torch.inf or bits.min() < 0 or bits.max() == _E4M3_NAN:
        raise tensors.fail("its scales are negative, infinite or no numbers: delete the file and fetch it again")
    by_output = whole.expand(outputs, 1).contiguous()
    return QuantizedWeight(values.contiguous(), scales.contiguous(), group=form.group, output_scales=by_output)


def _read_gptq(form: WeightFormat, tensors: _Tensors, shape: tuple[int, int]) -> QuantizedWeight:
    """`(q - zero) * scale`; inputs are packed in qweight `[in * bits / 32, out]`, outputs in qzeros."""
    outputs, inputs = shape
    groups, bits = _groups(form, inputs, tensors), form.bits
    centre = 1 << (bits - 1)
    elements = _unpacked(tensors.take("qweight", (inputs * bits // 32, outputs)), bits, 0).T - centre
    stored = _unpacked(tensors.take("qzeros", (groups, outputs * bits // 32)), bits, 1).T
    stored = (stored + (form.version == 1)) & ((1 << bits) - 1)
    zeros = stored - centre
    values = elements.to(torch.int8).contiguous()
    values = _packed_nibbles(values) if bits == 4 else values
    order = None
    if "g_idx" in tensors:
        order, values = _sorted(tensors.take("g_idx", (inputs,)), values, form, tensors)
    return QuantizedWeight(
        values,
        tensors.take("scales", (groups, outputs), _FLOATS).T.contiguous(),
        zeros.to(torch.int8).contiguous() if not form.symmetric or bool(zeros.any()) else None,
        group=form.group,
        order=order,
    )


def _read_awq(form: WeightFormat, tensors: _Tensors, shape: tuple[int, int]) -> QuantizedWeight:
    """`(q - zero) * scale`; eight outputs are packed in an int32 of qweight `[in, out / 8]` and of qzeros."""
    outputs, inputs = shape
    groups = _groups(form, inputs, tensors)

    def unpacked(suffix: str, rows: int) -> torch.Tensor:
        numbers = _unpacked(tensors.take(suffix, (rows, outputs // 8)), 4, 1).view(rows, -1, 8)
        return numbers[:, :, list(_AWQ_ORDER)].flatten(1).T - 8

    return QuantizedWeight(
        _packed_nibbles(unpacked("qweight", inputs)),
        tensors.take("scales", (groups, outputs), _FLOATS).T.contiguous(),
        unpacked("qzeros", groups).to(torch.int8).contiguous(),
        group=form.group,
    )


def _read_bitsandbytes(form: WeightFormat, tensors: _Tensors, shape: tuple[int, int]) -> QuantizedWeight:
    """8-bit integers of -127 to 127 times SCB / 127, or NF4 or FP4: a byte has two places in a table, highest first.

    The scales of groups may be in 8 bits themselves: places in another table, times a scale, plus an offset.
    """
    outputs, inputs = shape
    if form.bits == 8:
        if "weight_format" in tensors and tensors.take("weight_format", (1,), (torch.uint8,)).item():
            raise tensors.fail("its integers are in the order of a GPU's tiles: save it with a newer bitsandbytes")
        scales = tensors.take("SCB", (outputs, 1), (torch.float32,)) / INT8_MAX
        return QuantizedWeight(tensors.take("weight", shape, (torch.int8,)).contiguous(), scales)
    groups, state = _groups(form, inputs, tensors), tensors.state()
    if state.shape != shape or state.blocksize != form.group:
        raise tensors.fail(
            f"it is said to be {[*state.shape]} in groups of {state.blocksize}, expected {[*shape]} and {form.group}"
        )
    stored = tensors.take_bytes("weight", outputs * inputs // 2).view(outputs, inputs // 2)
    scales = tensors.take("weight.absmax", (outputs * groups,), (torch.float32, torch.uint8))
    if scales.dtype == torch.uint8:
        size = state.nested_blocksize
        if size < 1:
            raise tensors.fail(f"nested_blocksize is {size}, expected at least 1")
        places = tensors.take("weight.nested_quant_map", (256,), (torch.float32,))
        of_scales = tensors.take("weight.nested_absmax", (-(-len(scales) // size),), (torch.float32,))
        scales = places[scales.int()] * of_scales.repeat_interleave(size)[: len(scales)] + state.nested_offset
    return QuantizedWeight(
        stored >> 4 | stored << 4,
        scales.view(outputs, groups),
        group=form.group,
        table=tensors.take("weight.quant_map", (16,), (torch.float32,)),
    )


def _sorted(
    groups: torch.Tensor, values: torch.Tensor, form: WeightFormat, tensors: _Tensors
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The order in which a group's inputs are adjacent, and the values in it; `groups` `[in]` is each input's group."""
    inputs, size = len(groups), form.group or len(groups)
    expected = torch.arange(inputs, dtype=torch.int32) // size
    if torch.equal(groups, expected):
        return None, values
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], expected):
        raise tensors.fail(f"g_idx does not give each group {size} inputs")
    if form.bits == 4:
        return order.int(), _packed_nibbles(_nibbles_apart(values)[:, order])
    return order.int(), values[:, order]


def _unpacked(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The unsigned numbers that are packed in int32 along `dim`, the first lowest, in int16."""
    turned = packed.T.contiguous() if dim == 0 else packed.contiguous()
    numbers = turned.view(torch.uint8)
    if bits == 4:
        numbers = torch.stack((numbers & 0xF, numbers >> 4), dim=-1).flatten(1)
    return (numbers.T if dim == 0 else numbers).to(torch.int16)


def _nibbles_apart(values: torch.Tensor) -> torch.Tensor:
    return torch.stack((values & 0xF, values >> 4), dim=-1).flatten(1).to(torch.int8) - 8


def _packed_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Numbers from -8 to 7 `[out, in]` as uint8 `[out, in / 2]`."""
    unsigned = (values + 8).to(torch.uint8)
    return unsigned[:, ::2] | (unsigned[:, 1::2] << 4)
