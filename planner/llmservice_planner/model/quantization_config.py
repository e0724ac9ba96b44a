"""Reads which formats a checkpoint's matrices have from the `quantization_config` of its config.json, by method."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from llmservice_planner.model.quantization import (
    FLOAT_GROUPS,
    TABLE_GROUP,
    QuantizationConfig,
    QuantizationError,
    WeightFormat,
)

SUPPORTED = (
    "compressed-tensors (8-bit integers, fp8, 4-bit integers, mxfp8, mxfp4, NVFP4), fp8 (one scale, or blocks), "
    "gptq (4 or 8 bits), awq (4 bits, gemm), auto-round (as gptq, awq, fp8, mxfp8, mxfp4, NVFP4), "
    "modelopt (fp8, mxfp8, NVFP4), bitsandbytes (8-bit integers, NF4, FP4), mxfp4 (the experts of gpt-oss)"
)
SIDECARS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of their own in which older checkpoints say how they are quantised, with the method."""
_BITS = {"bits", "w_bit"}
"""One is in those of GPTQ and AWQ; transformers.js has a quantize_config.json too, which is about ONNX files."""
_BEFORE_LAYERS = re.compile(r"^(model\.)?((language|text)_model\.)?(model\.)?")
"""Of a name, which is another one where the language model is loaded alone."""
_DENSE_BITS = 16


def read_quantization(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """From a parsed config.json; None if the checkpoint is not quantised. Raises `QuantizationError`."""
    of_mlx = config.get("quantization")  # the only key of its older checkpoints; later ones repeat it
    text = config.get("text_config")
    of_text = text.get("quantization_config") if isinstance(text, Mapping) else None  # Kimi K2.5
    raw = config.get("quantization_config", config.get("compression_config")) or of_mlx or of_text
    if not raw:
        return None
    if not isinstance(raw, Mapping):
        raise QuantizationError(f"config.json: quantization_config is {raw!r}, expected an object")
    method = raw.get("quant_method", "mlx" if of_mlx else None)
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return QuantizationConfig(((("experts",), WeightFormat("mxfp4", 4, "float", group=32)),))
    parse = _PARSERS.get(str(method))
    if parse is None:
        raise QuantizationError(
            f"config.json: the checkpoint is quantised by {method!r}, supported are {SUPPORTED}: "
            "choose such a checkpoint, or the unquantised one"
        )
    return parse(raw)


def with_sidecars(config: dict[str, Any], sidecars: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """config.json, and what those of `SIDECARS` that a checkpoint has add to it."""
    if config.get("quantization_config"):
        return config
    for name, method in SIDECARS.items():
        found = sidecars.get(name) or {}
        quantization = found.get("quantization") if method == "modelopt" else found
        if isinstance(quantization, Mapping) and (method == "modelopt" or quantization.keys() & _BITS):
            return {**config, "quantization_config": {"quant_method": method, **quantization}}
    return config


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
        form = WeightFormat("bitsandbytes", 4, "nf" if stated == "nf4" else "fp", group=TABLE_GROUP)
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
    if group := FLOAT_GROUPS.get(f"{kind[:2]}{kind[3:5]}{bits}"):  # mx_fp and nv_fp
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


_NVFP4 = WeightFormat("modelopt", 4, "float", group=FLOAT_GROUPS["nvfp4"])
"""The group is not always stated, and sometimes another method's."""
_MODELOPT = {
    "FP8": WeightFormat("fp8", 8, "float", None, activations="fp8", static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat("fp8", 8, "float", activations="fp8"),
    "FP8_PB": WeightFormat("fp8", 8, "float", 128, 128, activations="fp8"),
    "FP8_PB_WO": WeightFormat("fp8", 8, "float", 128, 128),
    "MXFP8": WeightFormat("modelopt", 8, "float", group=FLOAT_GROUPS["mxfp8"]),
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
    for kind, group in FLOAT_GROUPS.items()
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
