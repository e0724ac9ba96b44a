"""Checkpoints of every quantised format, dense ones of the weights that they stand for, and adapters merged into one.

Each is written by its method's published formula, and those of compressed-tensors by that library.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

Tensors = dict[str, torch.Tensor]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],  # biases, which no format quantises
    "model_type": "qwen2",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
SHAPES = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (384, 256),
    "mlp.up_proj": (384, 256),
    "mlp.down_proj": (256, 384),
}


def dense_tensors() -> Tensors:
    random = torch.Generator().manual_seed(0)
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (320, 256), "lm_head.weight": (320, 256)}
    tensors = {name: torch.randn(size, generator=random) for name, size in sizes.items()}
    tensors["model.norm.weight"] = torch.ones(256)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = 1 + 0.1 * torch.randn(256, generator=random)
        for name, (outputs, inputs) in SHAPES.items():
            tensors[f"{prefix}.{name}.weight"] = torch.randn(outputs, inputs, generator=random) * inputs**-0.5
            if name.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{prefix}.{name}.bias"] = 0.1 * torch.randn(outputs, generator=random)
    return tensors


@dataclass(frozen=True, eq=False)
class Format:
    """`quantize` gives a matrix's tensors and, by the method's formula, the matrix that they stand for."""

    config: dict[str, Any]
    quantize: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    dtype: torch.dtype = torch.float32  # of the formula's result

    @property
    def weight_only(self) -> bool:
        groups = self.config.get("config_groups", {}).values()
        inputs = [each["input_activations"] or {} for each in groups]  # in groups: multiplied as they are
        rounded = (each.get("num_bits") == 8 and "group_size" not in each for each in inputs)
        return self.config["quant_method"] != "fp8" and not any(rounded)


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None, stored: str) -> Format:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        args = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        size = {"group": weights.get("group_size"), "channel": weight.shape[1]}.get(weights["strategy"])
        if weights["strategy"] == "block":
            tiles = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
        else:
            tiles = weight.view(1, 1, -1) if size is None else weight.unflatten(1, (-1, size))
        scale, zero = calculate_qparams(tiles.amin(-1), tiles.amax(-1), args)
        state = {
            "weight": weight,
            "weight_scale": scale.view(-1) if size is None and args.strategy == "tensor" else scale,
        }
        if not args.symmetric:
            state["weight_zero_point"] = zero.to(torch.int8)
        compressor = BaseCompressor.get_value_from_registry(stored)
        tensors = compressor.compress(state, scheme)
        expected = compressor.decompress(tensors, scheme)["weight"]
        if activations and not activations.get("dynamic"):
            tensors["input_scale"] = torch.tensor([0.05])
        return tensors, expected

    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}
    return Format({**config, "ignore": ["lm_head"]}, quantize)


def compressed_float4(kind: str, activations: dict[str, Any] | None) -> Format:
    """mxfp4, or nvfp4, by compressed-tensors."""
    size, strategy = (16, "tensor_group") if kind == "nvfp4" else (32, "group")
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": size}

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        args = QuantizationArgs(**weights)
        largest, state = weight.unflatten(1, (-1, size)).abs().amax(-1), {"weight": weight}
        if kind == "nvfp4":
            state["weight_global_scale"] = 448 * 6 / weight.abs().max().view(1)
            state["weight_scale"] = (largest / 6 * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        else:
            state["weight_scale"] = (largest.log2().floor() - 2).exp2()
        compressor = BaseCompressor.get_value_from_registry(f"{kind}-pack-quantized")
        tensors = compressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))
        numbers = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape, torch.float32)
        expected = dequantize(numbers, state["weight_scale"], args=args, global_scale=state.get("weight_global_scale"))
        if activations:
            tensors["input_global_scale"] = torch.tensor([20.0])
        return tensors, expected

    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": f"{kind}-pack-quantized", "ignore": ["lm_head"]}
    return Format({**config, "config_groups": {"group_0": group}}, quantize)


def compressed_mxfp8() -> Format:
    """By compressed-tensors, for activations that are rounded as well."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    rounded = {**weights, "dynamic": True, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        scale = (weight.unflatten(1, (-1, 32)).abs().amax(-1).log2().floor() - 8).exp2()
        compressor = BaseCompressor.get_value_from_registry("mxfp8-quantized")
        tensors = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        return tensors, compressor.decompress(tensors, scheme)["weight"]

    group = {"targets": ["Linear"], "weights": weights, "input_activations": rounded}
    config = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "ignore": ["lm_head"]}
    return Format({**config, "config_groups": {"group_0": group}}, quantize)


def modelopt_nvfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    made, _ = compressed_float4("nvfp4", None).quantize(weight)
    values, scale, whole = made["weight_packed"], made["weight_scale"], 1 / made["weight_global_scale"][0]
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    bits = np.stack((values.numpy() & 15, values.numpy() >> 4), -1).reshape(weight.shape)
    numbers = np.where(bits & 8, -sizes[bits & 7], sizes[bits & 7])
    exact = numbers * np.repeat(scale.float().numpy() * whole.numpy(), 16, 1)
    tensors = {"weight": values, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(0.05)}
    return tensors, torch.from_numpy(exact)


def packed(numbers: np.ndarray[Any, Any], bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned numbers in int32 along `axis`, the first (or `order`'s) lowest."""
    numbers = np.moveaxis(numbers.astype(np.uint32), axis, -1)
    parts = numbers.reshape(*numbers.shape[:-1], -1, 32 // bits)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for place, column in enumerate(order or range(32 // bits)):
        words |= parts[..., column] << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def affine(weight: np.ndarray[Any, Any], bits: int, symmetric: bool) -> tuple[Any, Any, Any]:
    """Groups `[..., group]` as unsigned integers with float16 scales and zeros."""
    most = 2**bits - 1
    low, high = np.minimum(weight.min(-1), 0), np.maximum(weight.max(-1), 0)
    if symmetric:
        high = np.maximum(-low, high)
        low = -high
    scale = ((high - low) / most).astype(np.float16)
    zero = np.full(scale.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.rint(-low / scale), 1, most)
    values = np.clip(np.rint(weight / scale[..., None].astype(np.float32)) + zero[..., None], 0, most)
    return values, scale, zero


def gptq(bits: int, group: int, *, symmetric: bool, reordered: bool = False, version: str = "gptq") -> Format:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        size = inputs if group == -1 else group
        order = np.random.default_rng(inputs).permutation(inputs) if reordered else np.arange(inputs)
        values, scale, zero = affine(weight.numpy()[:, order].reshape(outputs, -1, size), bits, symmetric)
        g_idx, columns = np.empty(inputs, np.int32), np.empty((outputs, inputs))
        g_idx[order] = np.arange(inputs) // size
        columns[:, order] = values.reshape(outputs, inputs)
        stored = zero - 1 if version == "gptq" else zero
        tensors = {
            "qweight": packed(columns.T, bits, 0),
            "qzeros": packed(stored.T, bits, 1),
            "scales": torch.from_numpy(np.ascontiguousarray(scale.T)),
            "g_idx": torch.from_numpy(g_idx),
        }
        return tensors, torch.from_numpy(scale[:, g_idx] * (columns - zero[:, g_idx]).astype(np.float16))

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": reordered, "sym": symmetric}
    return Format({**config, "checkpoint_format": version}, quantize, torch.float16)


def auto_round() -> Format:
    """With zeros as they are, and without the order of inputs, which is always theirs."""
    same = gptq(4, 64, symmetric=False, version="gptq_v2")

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, exact = same.quantize(weight)
        return {name: tensor for name, tensor in tensors.items() if name != "g_idx"}, exact

    config = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "packing_format": "auto_round"}
    return Format(config, quantize, torch.float16)


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values, scale, zero = affine(weight.numpy().reshape(len(weight), -1, 64), 4, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": packed(values.reshape(weight.shape).T, 4, 1, order),
        "qzeros": packed(zero.T, 4, 1, order),
        "scales": torch.from_numpy(np.ascontiguousarray(scale.T)),
    }
    exact = scale[..., None] * (values - zero[..., None]).astype(np.float16)
    return tensors, torch.from_numpy(exact.reshape(weight.shape))


def block_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tiles = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = tiles.abs().amax((1, 3)) / 448
    values = (tiles / scale[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
    exact = values.float().numpy() * np.kron(scale.numpy(), np.ones((128, 128), np.float32))
    return {"weight": values, "weight_scale_inv": scale}, torch.from_numpy(exact)


def tensor_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.05)}, values.float() * scale


def nf4_table() -> torch.Tensor:
    """Quantiles of a normal distribution, and zero (arXiv:2305.14314, section 3)."""
    sides = [torch.special.ndtri(torch.linspace(0.9677083, 0.5, size + 1)[:-1].double()) for size in (8, 7)]
    numbers = torch.cat((sides[0], -sides[1], torch.zeros(1).double())).sort().values
    return (numbers / numbers.max()).float()


def fp4_table() -> torch.Tensor:
    """A sign and three bits, in the order of bitsandbytes."""
    numbers = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
    return torch.cat((numbers, -numbers))


def nf4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return looked_up(weight, "nf4", nf4_table())


def fp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return looked_up(weight, "fp4", fp4_table())


def looked_up(weight: torch.Tensor, kind: str, numbers: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """By bitsandbytes, whose scales are quantised as well."""
    table, places = numbers.numpy(), np.linspace(-1, 1, 256, dtype=np.float32)
    groups = weight.numpy().reshape(-1, 64)
    scales = np.abs(groups).max(1)
    offset = np.float32(scales.mean())
    nested = np.pad(scales - offset, (0, -len(scales) % 256)).reshape(-1, 256)
    largest = np.abs(nested).max(1)
    stored = np.abs(nested[..., None] / largest[:, None, None] - places).argmin(-1)
    scales = (places[stored] * largest[:, None]).reshape(-1)[: len(scales)] + offset
    found = np.abs(groups[..., None] / scales[:, None, None] - table).argmin(-1).astype(np.uint8).reshape(-1, 2)
    state = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    tensors = {
        "weight": torch.from_numpy(found[:, :1] << 4 | found[:, 1:]),
        "weight.absmax": torch.from_numpy(stored.reshape(-1)[: len(scales)].astype(np.uint8)),
        "weight.quant_map": torch.from_numpy(table),
        "weight.nested_absmax": torch.from_numpy(largest),
        "weight.nested_quant_map": torch.from_numpy(places),
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    exact = table[found].reshape(-1, 64) * scales[:, None]
    return tensors, torch.from_numpy(exact.reshape(weight.shape))


def bitsandbytes_int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    largest = weight.abs().amax(1)
    values = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, torch.from_numpy(values.numpy() * (largest.numpy() / np.float32(127))[:, None])


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {**INT8, "type": "float"}
INT4 = {**INT8, "num_bits": 4, "strategy": "group", "group_size": 32}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FORMATS = {
    "W8A8 int8": compressed(INT8, TOKEN, "int-quantized"),
    "W8A16": compressed(INT8, None, "pack-quantized"),
    "W8A16, groups with zeros": compressed({**INT4, "num_bits": 8, "symmetric": False}, None, "pack-quantized"),
    "W4A16": compressed(INT4, None, "pack-quantized"),
    "W4A16, with zeros": compressed({**INT4, "symmetric": False}, None, "pack-quantized"),
    "fp8 dynamic": compressed(FP8, {**TOKEN, "type": "float"}, "float-quantized"),
    "fp8 static": compressed(
        {**FP8, "strategy": "tensor"},
        {**TOKEN, "type": "float", "strategy": "tensor", "dynamic": False},
        "float-quantized",
    ),
    "fp8 blocks of compressed-tensors": compressed(
        {**FP8, "strategy": "block", "block_structure": [128, 128]}, None, "float-quantized"
    ),
    "mxfp8": compressed_mxfp8(),
    "mxfp4": compressed_float4("mxfp4", None),
    "nvfp4": compressed_float4("nvfp4", {**TOKEN, "num_bits": 4, "type": "float", "group_size": 16}),
    "nvfp4 of Model Optimizer": Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt_nvfp4),
    "fp8 blocks": Format({"quant_method": "fp8", "weight_block_size": [128, 128]}, block_fp8),
    "fp8, one scale": Format({"quant_method": "fp8", "activation_scheme": "static"}, tensor_fp8),
    "gptq": gptq(4, 128, symmetric=True),
    "gptq, with zeros": gptq(4, 32, symmetric=False),
    "gptq 2, with zeros": gptq(4, 32, symmetric=False, version="gptq_v2"),
    "gptq, reordered": gptq(4, 64, symmetric=True, reordered=True),
    "gptq, 8 bits": gptq(8, -1, symmetric=True),
    "auto-round": auto_round(),
    "auto-round, mxfp4": Format(
        {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4, "group_size": 32, "act_bits": 4},
        compressed_float4("mxfp4", None).quantize,
    ),
    "nf4": Format(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "load_in_8bit": False}, nf4
    ),
    "int8 of bitsandbytes": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_int8),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq, torch.float16
    ),
}


def write(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def write_both(folder: Path, form: Format, made: Tensors | None = None, **config: Any) -> tuple[Path, Path]:
    """A quantised checkpoint, and a dense one of the weights that it stands for; of `made`, or random ones."""
    stored, exact = quantized_random(form) if made is None else quantized(form, made)
    return (
        write(folder / "quantized", stored, quantization_config=form.config, **config),
        write(folder / "exact", exact, **config),
    )


@cache
def quantized_random(form: Format) -> tuple[Tensors, Tensors]:
    """Computed once for all tests of a format: some take longer to quantise than to load and compare."""
    return quantized(form, dense_tensors())


def quantized(form: Format, made: Tensors) -> tuple[Tensors, Tensors]:
    """What a checkpoint of the format stores for `made`, and the weights that this stands for."""
    stored, exact = {}, {}
    for name, tensor in made.items():
        exact[name] = stored[name] = tensor
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            tensors, exact[name] = form.quantize(tensor)
            del stored[name]
            stored.update({f"{module}.{suffix}": each for suffix, each in tensors.items()})
    return stored, exact


GPT_OSS_LAYERS, GPT_OSS_EXPERTS, GPT_OSS_HIDDEN, GPT_OSS_WIDTH = 2, 4, 64, 128


def mxfp4_experts() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Blocks and scales of gpt-oss's matrices: all elements, small and large scales."""
    random = torch.Generator().manual_seed(1)
    found = {}
    matrices = (
        ("gate_up_proj", 2 * GPT_OSS_WIDTH, GPT_OSS_HIDDEN),
        ("down_proj", GPT_OSS_HIDDEN, GPT_OSS_WIDTH),
    )
    for layer in range(GPT_OSS_LAYERS):
        for name, outputs, inputs in matrices:
            groups = (GPT_OSS_EXPERTS, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*groups, 16), generator=random).to(torch.uint8)
            scales = torch.randint(100, 130, groups, generator=random).to(torch.uint8)
            found[f"model.layers.{layer}.mlp.experts.{name}"] = blocks, scales
    return found


def write_gpt_oss(folder: Path) -> tuple[Path, Path]:
    """A checkpoint of gpt-oss in mxfp4, and a dense one with the same numbers."""
    quantized, dense = folder / "quantized", folder / "exact"
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=193,
        hidden_size=GPT_OSS_HIDDEN,
        intermediate_size=GPT_OSS_WIDTH,
        num_hidden_layers=GPT_OSS_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=GPT_OSS_EXPERTS,
        num_experts_per_tok=2,
    )
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(dense)
    shutil.copytree(dense, quantized)
    exact = load_file(dense / "model.safetensors")
    stored = dict(exact)
    for name, (blocks, scales) in mxfp4_experts().items():
        exact[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        del stored[name]
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
    save_file(exact, dense / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    settings = json.loads((quantized / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (quantized / "config.json").write_text(json.dumps(settings))
    return quantized, dense


def merged(base: Path, adapter: Path | None) -> PreTrainedModel:
    """The model in `base` with `W + scale * B A` in the place of each `W` that the adapter changes, in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is not None:
        config = json.loads((adapter / "adapter_config.json").read_text())
        tensors = load_file(adapter / "adapter_model.safetensors")
        modules = dict(model.named_modules())
        for key in [key for key in tensors if "lora_A" in key]:
            change = tensors[key.replace("lora_A", "lora_B")] @ tensors[key] * config["lora_alpha"] / config["r"]
            module = modules[key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
            module.weight = torch.nn.Parameter(module.weight + change)  # a tied head is the embedding no more
    return model


def write_expert_adapter(folder: Path, base: PreTrainedModel, *, stacked: bool, rank: int) -> PreTrainedModel:
    """A random adapter of all experts and of attention, and the model with it merged.

    stacked: as PEFT stores the `target_modules` of a mixture, gate and up with twice the rank, and `target_parameters`,
    whose formula this is; else with the names of each expert's modules.
    """
    torch.manual_seed(rank)
    model, factors = deepcopy(base), {}

    def change(name: str, outputs: int, inputs: int, count: int = 1, rank: int = rank) -> torch.Tensor:
        down, up = torch.randn(count * rank, inputs) / 4, torch.randn(outputs, count * rank) / 4
        factors[f"base_model.model.{name}.lora_A.weight"], factors[f"base_model.model.{name}.lora_B.weight"] = down, up
        return 2 * torch.einsum("ore,eri->eoi", up.view(outputs, rank, count), down.view(count, rank, inputs))

    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            module.weight.data += change(name, *module.weight.shape)[0]
        for part in ("gate_up_proj", "down_proj"):
            if name.endswith(".experts"):
                weight = getattr(module, part).data
                weight = weight.transpose(1, 2) if module.is_transposed else weight
                count, outputs, inputs = weight.shape
                if stacked:
                    if part == "down_proj":
                        weight += change(f"{name}.base_layer", outputs, inputs, count)
                    else:
                        weight += change(name, outputs, inputs, count, 2 * rank)
                    continue
                for expert, rows in enumerate(weight):
                    halves = [rows]
                    if part == "gate_up_proj":
                        halves = [*rows.chunk(2)] if module.is_concatenated else [rows[::2], rows[1::2]]
                    for half, of in zip(halves, ("gate_proj", "up_proj") if len(halves) > 1 else (part,), strict=True):
                        half.add_(change(f"{name}.{expert}.{of}", *half.shape)[0])
    folder.mkdir()
    config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    if stacked:
        config["target_parameters"] = ["gate_up_proj", "down_proj"]
        config |= {f"{key}_pattern": {r".*\.gate_up_proj": of * rank} for key, of in (("rank", 2), ("alpha", 4))}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(factors, folder / "adapter_model.safetensors")
    return model
