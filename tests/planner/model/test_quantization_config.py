"""The formats of config.json, and which matrices have them."""

from contextlib import nullcontext
from typing import Any

import pytest

from llmservice_planner.model.quantization import QuantizationConfig, QuantizationError, WeightFormat
from llmservice_planner.model.quantization_config import read_quantization, with_sidecars

INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 128}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
ROUNDED = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def parsed(**raw: Any) -> QuantizationConfig:
    config = read_quantization({"model_type": "gpt_oss", "quantization_config": raw})
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq/int4/1x128/zeros"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True}, "gptq/int8/reordered"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "fp8/float8/128x128/fp8-activations",
        ),
        ({"quant_method": "fp8"}, "fp8/float8/tensor/fp8-activations"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8/float8/tensor/fp8-activations"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            "fp8/float8/fp8-activations",
        ),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, "fp8/float8/128x128"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "modelopt/float8/1x32"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mxfp8-quantized",
                "config_groups": {"a": {"weights": {**FLOAT4, "num_bits": 8, "group_size": 32}}},
            },
            "compressed-tensors/float8/1x32",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "bitsandbytes/nf4/1x64",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes/fp4/1x64"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes/int8"),
        ({"quant_method": "mxfp4"}, "mxfp4/float4/1x32"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, "gptq/int4/1x128"),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 64, "packing_format": "auto_round:auto_awq"},
            "awq/int4/1x64/zeros",
        ),
        (
            {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4, "group_size": 32, "act_bits": 4},
            "compressed-tensors/float4/1x32",
        ),
        (
            {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 8, "group_size": 32, "act_bits": 8},
            "compressed-tensors/float8/1x32",
        ),
        (
            {"quant_method": "auto-round", "data_type": "nv_fp", "bits": 4, "group_size": 16, "act_bits": 4},
            "compressed-tensors/float4/1x16",
        ),
        (
            {"quant_method": "auto-round", "data_type": "fp", "bits": 8, "group_size": -1, "act_bits": 16},
            "compressed-tensors/float8",
        ),
        (
            {
                "quant_method": "auto-round",
                "data_type": "fp",
                "bits": 8,
                "group_size": 0,
                "act_bits": 8,
                "act_dynamic": False,
            },
            "compressed-tensors/float8/tensor/fp8-activations",
        ),
        (
            {"quant_method": "auto-round", "data_type": "fp", "bits": 8, "weight_block_size": [128, 128]},
            "fp8/float8/128x128/fp8-activations",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "modelopt/float4/1x16"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"a": {"weights": FLOAT4, "input_activations": {**FLOAT4, "dynamic": "local"}}},
            },
            "compressed-tensors/float4/1x16",
        ),
    ],
)
def test_a_code_names_the_format_and_is_read_again(raw: dict[str, Any], code: str) -> None:
    form = parsed(**raw).formats[0][1]
    assert form.code == code
    assert WeightFormat.parse(code).code == code


@pytest.mark.parametrize("order", ["abc", "cba"])
def test_each_module_has_the_format_that_names_it_most_exactly_unless_it_is_ignored(order: str) -> None:
    groups = {
        "a": {"targets": ["model.layers.2.mlp.down_proj"], "weights": INT4, "format": "pack-quantized"},
        "b": {"targets": ["re:.*down_proj"], "weights": INT8, "format": "int-quantized"},
        "c": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
    }
    config = parsed(
        quant_method="compressed-tensors",
        format="mixed-precision",
        config_groups={name: groups[name] for name in order},
        ignore=["lm_head", "re:.*layers.0.*"],
    )
    bits = {
        name: form and form.bits
        for name in (
            "model.layers.2.mlp.down_proj",
            "model.layers.1.mlp.down_proj",
            "model.layers.1.mlp.up_proj",
            "model.layers.0.mlp.up_proj",
            "lm_head",
        )
        for form in [config.format_of(name)]
    }
    assert list(bits.values()) == [4, 8, 4, None, None]


def test_layers_of_auto_round_differ_where_it_says_so() -> None:
    config = parsed(
        quant_method="intel/auto-round",
        bits=4,
        group_size=128,
        sym=False,
        packing_format="auto_round",
        extra_config={
            "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32},
            ".*mlp.gate$": {"bits": 16, "data_type": "float"},
            "lm_head": {"bits": 4, "sym": True},
        },
    )
    codes = {
        name: form and f"{form.code}, version {form.version}"
        for name in ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "lm_head")
        for form in [config.format_of(name)]
    }
    assert [*codes.values()] == [
        "gptq/int8/1x32/zeros, version 2",
        "gptq/int4/1x128/zeros, version 2",
        "gptq/int4/1x128, version 2",
    ]
    assert config.main == config.format_of("model.layers.1.mlp.down_proj")
    default = parsed(quant_method="auto-round", bits=4, group_size=128)
    assert default.format_of("lm_head") is None
    assert default.main.version == 1
    floats = {"data_type": "mx_fp", "group_size": 32}
    mixed = parsed(quant_method="auto-round", bits=4, **floats, extra_config={"q_proj": {"bits": 8, **floats}})
    forms = [mixed.format_of(name) for name in ("layers.0.q_proj", "layers.0.k_proj", "lm_head")]
    assert [form and form.bits for form in forms] == [8, 4, None]


@pytest.mark.parametrize(
    "raw",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {r"-:.*\.1\.mlp\.gate$": {}}},
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*.1.mlp.gate*", "lm_head"]},
        {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"]},
    ],
)
def test_modules_are_left_out_by_the_expressions_of_each_method(raw: dict[str, Any]) -> None:
    config = parsed(**raw)
    assert config.format_of("model.layers.1.mlp.gate") is None
    assert config.format_of("lm_head") is None
    assert config.format_of("model.layers.0.mlp.gate") is config.format_of("model.layers.1.mlp.up_proj") is not None


@pytest.mark.parametrize("names", [{}, {"modules_to_not_convert": None}, {"ignored_layers": []}])
def test_the_head_is_fp8_where_others_are_named_without_it(names: dict[str, Any]) -> None:
    assert parsed(quant_method="fp8", **names).format_of("lm_head") is None
    config = parsed(quant_method="fp8", modules_to_not_convert=["q_proj"])
    assert config.format_of("lm_head") == config.main


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"quant_method": "hqq"}, "quantised by 'hqq', supported are"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
            "bnb_4bit_quant_type is 'int4', expected nf4 or fp4",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 100}, "group_size is 100, expected a multiple of 8"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"blocks of \[128\], expected two sizes"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2', expected e4m3"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "quant_algo is 'MIXED_PRECISION', expected one of FP8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mxfp4-pack-quantized",
                "config_groups": {"a": {"weights": FLOAT4}},
            },
            "group_size is 16, expected 32",
        ),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "group_size is None, expected 32"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "fp"}, "data_type is 'fp' in 4 bits, expected int"),
        ({"quant_method": "auto-round", "bits": "4", "data_type": "mx_fp"}, "bits is '4', expected a whole number"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {"lm_head": 4}}, "no object of"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "INT4"}},
            "quant_algo is 'INT4', expected one of FP8",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
            "quant_algo is 'MIXED_PRECISION', expected one of FP8",
        ),
        ({"quant_method": "auto-round", "bits": 2, "group_size": 128}, "bits is 2, expected 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": True}, "dynamic is no object of objects"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*down.*": {"bits": 3}}},
            "bits is 3, expected 4 or 8",
        ),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation is 'hadamard': rotated activations"),
        (
            {"quant_method": "fp8", "weight_scale_semantics": "inverse"},
            "is 'inverse', supported are scales that multiply",
        ),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:*"]}, r"names 're:\*': nothing to repeat"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:(a|a)*$"]}, r"names 're:.*', which repeats a group"),
        ({"quant_method": "fp8", "modules_to_not_convert": [r"re:(\w+[)]){2,}"]}, "which repeats a group"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:" + "(" * 5000 + ")" * 5000]}, "maximum recursion"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["re:a{1" + "0" * 20 + "}"]}, "repetition number"),
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"a": {"weights": INT4, "input_activations": {**ROUNDED, "symmetric": False}}},
            },
            "config.json: activations are asymmetric int of 8 bits, expected symmetric int of 8 bits, or none",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"a": {"weights": INT4, "input_activations": 8}},
            },
            "config.json: input_activations are 8, expected an object",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "transform_config": {"config_groups": {"R4": {}}},
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": INT4}},
            },
            "transform_config rotates activations",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "sparsity_config": {"format": "sparse-24-bitmask"},
                "config_groups": {"a": {"weights": INT4}},
            },
            "sparsity_config.format is 'sparse-24-bitmask', expected dense",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {"weights": INT4}}},
            "format is 'marlin-24', expected one of int-quantized",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        parsed(**raw)


@pytest.mark.parametrize(("location", "is_read"), [("weight_output", True), ("input", False)])
def test_rotations_of_weights_alone_change_nothing(location: str, is_read: bool) -> None:
    """SpinQuant's R1 and R2 are in the weights of the checkpoint; those of activations would have to be computed."""
    applied = [{"location": "weight_input", "targets": ["lm_head"]}, {"location": location, "targets": ["Linear"]}]
    linear = {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"}
    method = {"quant_method": "compressed-tensors", "config_groups": {"a": linear}}
    with nullcontext() if is_read else pytest.raises(QuantizationError, match="rotates activations"):
        rotated = parsed(**method, transform_config={"config_groups": {"R1": {"apply": applied}}})
        assert rotated == parsed(**method)


def test_4_bits_with_rounded_activations_are_no_8_bit_products() -> None:
    weights = {**INT8, "num_bits": 4}
    for activations in (ROUNDED, {**ROUNDED, "type": "float"}):
        linear = {"weights": weights, "input_activations": activations, "format": "pack-quantized"}
        form = parsed(quant_method="compressed-tensors", config_groups={"a": linear}).main
        assert form.held_as("auto", on_cpu=True) == "stored"


@pytest.mark.parametrize("names", [["quantization"], ["quantization", "quantization_config"]])
def test_mlx_is_refused_by_its_name(names: list[str]) -> None:
    with pytest.raises(QuantizationError, match="quantised by 'mlx', supported are"):
        read_quantization({name: {"group_size": 64, "bits": 4, "mode": "affine"} for name in names})


def test_the_config_of_a_language_model_beside_images_may_say_how_it_is_quantised() -> None:
    quantization = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    assert read_quantization({"text_config": quantization}) == read_quantization(quantization)


def test_attention_and_caches_that_are_quantised_leave_the_weights_as_they_are() -> None:
    method = {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": {}}
    attention = {"targets": ["LlamaAttention"], "weights": None, "format": "dense"}
    assert read_quantization({"quantization_config": {**method, "config_groups": {}}}) is None
    linear = {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"}
    assert len(parsed(**method, config_groups={"a": attention, "b": linear}).formats) == 1


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
@pytest.mark.parametrize("found", [{"per_channel": True, "reduce_range": True, "per_model_config": {}}, {}])
def test_a_file_about_the_onnx_weights_beside_a_checkpoint_says_nothing_of_it(name: str, found: dict[str, Any]) -> None:
    """As transformers.js writes it."""
    assert read_quantization(with_sidecars({"model_type": "bert"}, {name: found})) is None
