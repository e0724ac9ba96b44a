"""Any decoder-only model of transformers, on our paged cache.

Its attention layers call the function that is registered with transformers' `AttentionInterface`, its matrices are our
`Linear`s, and its experts, where they have the layout of ours, our `Experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch.overrides import TorchFunctionMode
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from llmservice_planner.model.weight_counts import LANGUAGE_MODEL, ROUTER
from llmservice_server.backend.base import Attend, PlainMatrix, RowFactors, no_changes
from llmservice_server.backend.experts import Experts, Mixture
from llmservice_server.backend.layers import Activation, LayerOps, Linear
from llmservice_server.backend.torch.layer_ops import TorchLayerOps, TorchLinear
from llmservice_server.models.llama4 import adapt_llama4
from llmservice_server.models.transformers_attention import NAME, attend_of_pass, pass_latents, positions_of_pass
from llmservice_server.models.transformers_config import TransformersConfig, fix_long_rope, one_line, read_configs
from llmservice_server.models.weights import SUPERFLUOUS
from llmservice_server.types.errors import ModelLoadError

_TEXT_PARTS = {
    rf"^{LANGUAGE_MODEL.pattern}lm_head\.": "lm_head.",
    rf"^{LANGUAGE_MODEL.pattern}model\.blocks\.": "model.layers.",  # Kimi K2.5, saved by transformers
    rf"^{LANGUAGE_MODEL.pattern}(model\.)?": "model.",
}
"""Where checkpoints of models with images or sound hold their language model, and its names alone."""

LinearOf = Callable[[Sequence[str], torch.Tensor, torch.Tensor | None], Linear | None]
"""Makes a matrix of the names of the modules that it is fused of, and of their weight and bias. None: it does not."""
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors of all experts, and what a checkpoint has for each expert instead."""
_GATES: tuple[Activation, ...] = ("silu", "gelu_tanh")
_GATE_PROBE = torch.linspace(-20.0, 20.0, 64)
"""Beyond the bounds of gates that have some."""


class _Product(torch.nn.Module):
    """A `Linear` of ours in the place of one of torch's."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    @property
    def weight(self) -> torch.Tensor:
        return self.linear.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        rows = self.linear(hidden.flatten(0, -2))
        return rows.view(*hidden.shape[:-1], rows.shape[-1])


class _Mixture(torch.nn.Module):
    """`Experts` of ours in the place of those of transformers."""

    def __init__(self, name: str, experts: Experts, ops_of: Callable[[], LayerOps]) -> None:
        super().__init__()
        self.name = name
        self.experts = experts
        self._ops_of = ops_of

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden: `[..., hidden_size]`. chosen and weights: of each token, `[num_tokens, top_k]`."""
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        ops = self._ops_of()
        return self.experts(rows, chosen.contiguous(), weights.float().contiguous(), ops).view_as(hidden)

    def modules_of_experts(self) -> Iterator[dict[str, int]]:
        """As of `Model.modules`."""
        for linears, parts in zip((self.experts.gate_up, self.experts.down), _STACKS.values(), strict=True):
            outputs = linears[0].weight.shape[0] // len(parts)
            for expert in range(len(linears)):
                yield {f"{self.name}.{expert}.{part}": outputs for part in parts}


class _Router:
    """Implements `PlainMatrix`: the matrix of a router of transformers, whose only product gets the adapters' too."""

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self.weight: torch.Tensor = module.weight
        self.changes = no_changes
        self._route = module.forward
        module.forward = self._forward

    def _forward(self, *args: Any, **settings: Any) -> Any:
        if not (changes := [*self.changes()]):
            return self._route(*args, **settings)
        with _ChangedProduct(changes):
            return self._route(*args, **settings)


class _ChangedProduct(TorchFunctionMode):
    """Within it, products include what adapters change."""

    def __init__(self, changes: Sequence[RowFactors]) -> None:
        super().__init__()
        self._changes = changes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear:
            for change in self._changes:
                low = change.keep(args[0][change.rows].to(change.down.dtype) @ change.down.t())
                product[change.rows] += low @ change.up
        return product


class _Given(torch.nn.Module):
    """In the place of the decoder when only the head is to be computed: returns the states that are set."""

    states: torch.Tensor

    @property
    def decoder(self) -> _Given:
        """OPT's head calls a part of it."""
        return self

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        return _States(last_hidden_state=self.states[None])


class _States(BaseModelOutputWithPast):
    """Lacks what some decoders return beside the states, such as the router's logits: it is not read further."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class TransformersModel:
    """Implements `Model`."""

    def __init__(
        self,
        model: Any,
        config: TransformersConfig,
        dtype: torch.dtype,
        device: torch.device,
        quantized_of: LinearOf,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.ops: LayerOps = TorchLayerOps()
        adapt_llama4(model)
        self._plain: list[PlainMatrix] = [*pass_latents(model), *_routers_of(model)]
        _drop_masks(model)
        head = model.get_output_embeddings()
        products: dict[int, _Product] = {}
        self._mixtures: list[_Mixture] = []
        self._replace(model, quantized_of, products)  # before the others are moved: the device never holds these dense
        model.to(device)
        self._replace(model, _dense, products)
        last = products.pop(id(head), None)
        self._products = [*products.values(), *([] if last is None else [last])]
        prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"  # Llama 4's is wrong
        self._decoder = getattr(model, prefix)
        self.modules = self._modules(model)
        self.renamed = renamed_module(model)
        self._given = _Given()
        setattr(model, prefix, self._given)
        self._head_only = model

    def _replace(self, model: torch.nn.Module, linear_of: LinearOf, products: dict[int, _Product]) -> None:
        """What `linear_of` makes a matrix of. `products`: by the ids of what they are in the place of."""
        for module, name, put in _parts_of(model):
            if (activation := _gate_of(module)) is None:
                if (linear := linear_of([name], *_matrix_of(module))) is not None:
                    products[id(module)] = _Product(linear)
                    put(products[id(module)])
            elif (experts := _experts_of(module, name, activation, linear_of, self.device)) is not None:
                self._mixtures.append(_Mixture(name, experts, lambda: self.ops))
                put(self._mixtures[-1])

    @classmethod
    def load(
        cls,
        folder: Path,
        config: TransformersConfig,
        dtype: torch.dtype,
        device: torch.device,
        quantized_of: LinearOf,
        tensors: dict[str, torch.Tensor] | None,
        max_model_len: int | None,
    ) -> TransformersModel:
        """`tensors`: the checkpoint's, under its names or the model's; None: they are read from its files.

        quantized_of: makes matrices that are not dense, which the device holds instead.

        Raises `ModelLoadError` for a tensor that is missing, of the wrong shape, or unreadable.
        """
        whole, text = read_configs(folder)
        text.tie_word_embeddings = config.tied_embeddings
        fix_long_rope(text, max_model_len or config.max_context)
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
        try:
            model, found = model_class.from_pretrained(
                folder if tensors is None else None,
                state_dict=tensors,
                config=text,
                dtype=dtype,
                attn_implementation=NAME,
                key_mapping=None if text is whole else _TEXT_PARTS,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are refused below, by their names
                output_loading_info=True,
            )
        except SafetensorError as error:
            raise ModelLoadError(
                f"{folder} holds an unreadable safetensors file ({error}): delete it and fetch it again"
            ) from error
        except Exception as error:  # transformers raises what its parts raise
            raise ModelLoadError(f"{folder}: transformers cannot load the weights: {one_line(error)}") from error
        zeros = {name for name, tensor in (tensors or {}).items() if name.endswith(".bias") and not tensor.any()}
        _refuse_incomplete(found, zeros, folder, config, is_part=text is not whole)
        return cls(model.eval().requires_grad_(requires_grad=False), config, dtype, device, quantized_of)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The states after the last norm; otherwise as `Model.forward`."""
        token, placed = attend_of_pass.set(attend), positions_of_pass.set(positions)
        try:
            output = self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            attend_of_pass.reset(token)
            positions_of_pass.reset(placed)
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def forward_by_piece(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: int | None = None
    ) -> Iterator[torch.Tensor | None]:
        """One piece: transformers computes all layers in one call."""
        yield self.forward(token_ids, positions, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """By the model's own code, which may scale or bound what its head computes."""
        self._given.states = hidden
        tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        logits: torch.Tensor = self._head_only(input_ids=tokens, use_cache=False).logits[0]
        return logits.float()

    def norm_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def linears(self) -> Iterator[Linear]:
        return (product.linear for product in self._products)

    def mixtures(self) -> Iterator[Mixture]:
        return iter(self._mixtures)

    def plain_matrices(self) -> Iterator[PlainMatrix]:
        return iter(self._plain)

    def _modules(self, model: torch.nn.Module) -> list[dict[str, int]]:
        names = {id(module): name for name, module in model.named_modules()}
        return [
            *({names[id(product)]: product.weight.shape[0]} for product in self._products),
            *(part for mixture in self._mixtures for part in mixture.modules_of_experts()),
        ]

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        for product in self._products:
            product.linear = convert(product.linear)
        for mixture in self._mixtures:
            mixture.experts.map_linears(convert)

    @property
    def weight_bytes(self) -> int:
        """Matrices that are not ours, and ours. A tied head that is packed is a second copy of the embedding."""
        modules = (self._decoder, self._head_only)
        tensors: dict[int, int] = {
            id(each): each.nbytes for module in modules for each in (*module.parameters(), *module.buffers())
        }
        ours: int = sum(linear.nbytes for linear in self.linears() if id(linear.weight) not in tensors)
        return sum(tensors.values()) + ours + sum(mixture.experts.nbytes for mixture in self._mixtures)


class Replaced(NamedTuple):
    """A weight of transformers' model that ours stand for."""

    tensor: str
    shape: tuple[int, ...]
    modules: list[list[str]]  # of each of our matrices, what the checkpoint may name the modules that it is fused of


def without_memory(folder: Path) -> Any:
    """A model that `examine` has found fit to be served."""
    _, text = read_configs(folder)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    with torch.device("meta"):
        model = model_class._from_config(text)
    adapt_llama4(model)
    pass_latents(model)
    return model


def replaced_weights(model: torch.nn.Module) -> Iterator[Replaced]:
    """Of a model of `without_memory`."""
    for module, name, _ in _parts_of(model):
        if _gate_of(module) is None:
            yield Replaced(f"{name}.weight", tuple(module.weight.shape), [[name]])
            continue
        for stack, parts in _STACKS.items():
            shape = tuple(getattr(module, stack).shape)
            modules = [[f"{name}.{expert}.{part}" for part in parts] for expert in range(shape[0])]
            yield Replaced(f"{name}.{stack}", shape, modules)


def renamed_module(model: Any) -> Callable[[str], list[str]]:
    """What transformers' model calls a module of a checkpoint: several where it splits a matrix by its outputs."""
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    splits = [each for each in transforms if isinstance(each, WeightConverter) and _splits_outputs(each)]
    return lambda name: _renamed(f"{name}.weight", renamings, splits)


def _splits_outputs(converter: Any) -> bool:
    return all(type(each).__name__ in ("Split", "Chunk") and each.dim == 0 for each in converter.operations)


def _renamed(tensor: str, renamings: Sequence[Any], splits: Sequence[Any]) -> list[str]:
    for renaming in renamings:
        tensor, _ = renaming.rename_source_key(tensor)
    for split in splits:
        first, source = split.rename_source_key(tensor)
        if source is not None:
            return [
                first.replace(split.target_patterns[0], target).removesuffix(".weight")
                for target in split.target_patterns
            ]
    return [tensor.removesuffix(".weight")]


def _parts_of(model: torch.nn.Module) -> Iterator[tuple[Any, str, Callable[[torch.nn.Module], None]]]:
    """Linear layers, and experts with a gate of ours; the name of each, and what puts another in its place."""
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if name == "classifier":
                continue  # of LongCat's routers, which read its weight
            if type(child) is torch.nn.Linear or isinstance(child, Conv1D) or _gate_of(child) is not None:
                yield child, f"{path}{path and '.'}{name}", partial(setattr, parent, name)


def _routers_of(model: torch.nn.Module) -> Iterator[_Router]:
    """Those that are no linear layers."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if ROUTER.search(name) and type(module) is not torch.nn.Linear and getattr(weight, "ndim", 0) == 2:
            yield _Router(name, module)


def _dense(_: Sequence[str], weight: torch.Tensor, bias: torch.Tensor | None) -> TorchLinear:
    return TorchLinear(weight.contiguous(), bias)


def _matrix_of(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight `[out, in]` and the bias of a linear layer."""
    if isinstance(module, Conv1D):
        return module.weight.data.t(), module.bias.data
    return module.weight, module.bias


def _gate_of(module: Any) -> Activation | None:
    """Of experts with the layout of ours; None: it is something else, or its gate is none of ours.

    transformers has all experts in one tensor, and attributes that describe it.
    """
    kind = tuple(getattr(module, name, None) for name in ("has_gate", "is_concatenated"))
    if kind != (True, True) or getattr(module, "has_post_expert_norm", False):
        return None
    for activation in _GATES:
        expected = TorchLayerOps().gated(_GATE_PROBE[None].clone(), activation)
        if torch.allclose(module._apply_gate(_GATE_PROBE[None]), expected):
            return activation
    return None


def _experts_of(
    module: Any, name: str, activation: Activation, linear_of: LinearOf, device: torch.device
) -> Experts | None:
    """None if all of them stay as they are."""
    dense: list[list[TorchLinear]] = []
    found: list[list[Linear | None]] = []
    for stack, parts in _STACKS.items():
        weights, biases = getattr(module, stack).data, getattr(module, f"{stack}_bias") if module.has_bias else None
        weights = weights.transpose(1, 2) if module.is_transposed else weights
        weights = weights.contiguous() if linear_of is _dense else weights  # all in one tensor
        dense.append([TorchLinear(weight, None if biases is None else biases[at]) for at, weight in enumerate(weights)])
        names = ([f"{name}.{expert}.{part}" for part in parts] for expert in range(len(weights)))
        found.append([linear_of(each, at.weight, at.bias) for each, at in zip(names, dense[-1], strict=True)])
    if not any(found[0] + found[1]):
        return None
    gate_up, down = (
        [linear or replace(plain, weight=plain.weight.clone()).to(device) for linear, plain in zip(*each, strict=True)]
        for each in zip(found, dense, strict=True)
    )
    return Experts(gate_up, down, activation)


def _drop_masks(decoder: torch.nn.Module) -> None:
    """Free the causal masks `[max_context, max_context]` that some models keep and none computes with."""
    for module in decoder.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.dtype == torch.bool and buffer.ndim >= 2:
                module.register_buffer(name, buffer.new_empty(0), persistent=False)


def _refuse_incomplete(
    found: Mapping[str, Any], zeros: set[str], folder: Path, config: TransformersConfig, *, is_part: bool
) -> None:
    """`zeros`: biases of a quantised checkpoint that change nothing where the model has none (AutoGPTQ)."""
    missing, unknown = sorted(found["missing_keys"]), sorted({*found["unexpected_keys"]} - zeros)
    unknown = [name for name in unknown if not config.is_extra(name) and not SUPERFLUOUS.search(name)]
    mismatched = sorted(found["mismatched_keys"])
    if missing:
        raise ModelLoadError(
            f"{folder}: {len(missing)} tensors that {config.architecture} needs are in none of its safetensors files, "
            f"among them {missing[0]}"
        )
    if mismatched:
        key, given, expected = mismatched[0]
        raise ModelLoadError(f"{folder}: {key} has the shape {list(given)}, config.json makes it {list(expected)}")
    if unknown and not is_part:
        raise ModelLoadError(
            f"{folder} holds {unknown[0]}, which {config.architecture} with this config.json has no place for"
        )
