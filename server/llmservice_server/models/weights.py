"""The weights of a model that is being built: allocated, and noted with the tensors that will fill them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from llmservice_server.backend.layers import Linear
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.backend.torch.layer_ops import TorchLinear

SUPERFLUOUS = re.compile(
    r"(rotary_emb\.inv_freq|\.masked_bias|\.attn\.bias|\.(q|k|v|kv|prob_output)_scale|\.[qkv]_zero_point|"
    r"(q|k|v|qkv)_proj\.output_scale)$"
)
"""Names of what old exporters wrote, and of scales of fp8 caches and of quantised attention, of which ours has none."""


@dataclass(frozen=True, slots=True)
class QuantizedPlace:
    """A matrix without memory, which the loader replaces."""

    linear: TorchLinear
    parts: dict[str, int]  # by the name of the checkpoint's module, its outputs, in order


@dataclass(frozen=True, slots=True)
class ComputedPlace:
    """Weights that are computed of some of the checkpoint's tensors."""

    shapes: Mapping[str, tuple[int, ...]]  # of the tensors, by their names
    fill: Callable[..., object]  # takes the tensors, in order


@dataclass(frozen=True, slots=True)
class StackedPlace:
    """Matrices of one size without memory, which the loader replaces: a few tensors have them all."""

    linears: list[TorchLinear]
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors, by their names
    read: Callable[..., Iterable[QuantizedWeight]]  # takes the tensors, in order


@dataclass(frozen=True, slots=True)
class Weights:
    """Allocates uninitialised weights, and notes them for the loader, under the names of the checkpoint.

    Names are relative to `prefix`, and the notes are shared by all prefixes. A matrix of a module that is `quantized`
    gets no memory. Once all `tensors` are filled, `finish` has to be called.
    """

    dtype: torch.dtype
    device: torch.device
    quantized: Collection[str] = ()  # modules of the checkpoint
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of the checkpoint's tensors, by their names
    prefix: str = ""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # to be filled, by the checkpoint's names
    places: list[QuantizedPlace] = field(default_factory=list)
    computed: list[ComputedPlace] = field(default_factory=list)
    stacked: list[StackedPlace] = field(default_factory=list)
    modules: dict[int, dict[str, int]] = field(default_factory=dict)  # by the id of a matrix, what it is fused of
    _finishing: list[Callable[[], object]] = field(default_factory=list)

    def at(self, name: str) -> Self:
        """With names relative to the module `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a tensor."""
        return self.prefix + name in self.shapes

    def has_matrix(self, name: str) -> bool:
        """Whether the checkpoint has such a module, dense or quantised."""
        return self.has(f"{name}.weight") or self.prefix + name in self.quantized

    def shape(self, name: str) -> tuple[int, ...] | None:
        """That of the checkpoint's tensor; None: there is none."""
        return self.shapes.get(self.prefix + name)

    def empty(self, *shape: int) -> torch.Tensor:
        """One that no tensor of the checkpoint fills as a whole."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self.tensors[self.prefix + name] = self.empty(*shape)
        return tensor

    def norm(self, name: str, size: int, *, less_one: bool = False) -> torch.Tensor:
        """The weight of an RMS norm. `less_one`: the checkpoint has it less one; it is float32, to lose nothing."""
        if not less_one:
            return self.tensor(f"{name}.weight", size)
        weight = torch.empty(size, dtype=torch.float32, device=self.device)
        self.tensors[f"{self.prefix}{name}.weight"] = weight
        self.when_filled(lambda: weight.add_(1))
        return weight

    def linear(
        self, parts: dict[str, int], inputs: int, *, bias: bool = False, memory: torch.Tensor | None = None
    ) -> TorchLinear:
        """A matrix `[sum of outputs, inputs]`, fused of the modules `parts`: the outputs of each, by its name.

        One large product is faster than several small ones. It is in `memory`, if that is given.
        """
        named = {self.prefix + name: outputs for name, outputs in parts.items()}
        outputs, sizes = sum(parts.values()), list(parts.values())
        biases = self.empty(outputs) if bias else None
        if biases is not None:
            self.tensors.update(zip((f"{name}.bias" for name in named), torch.split(biases, sizes), strict=True))
        is_quantized = not named.keys().isdisjoint(self.quantized)
        if is_quantized:
            weight = torch.empty(outputs, inputs, dtype=self.dtype, device="meta")
        else:
            weight = self.empty(outputs, inputs) if memory is None else memory
            self.tensors.update(zip((f"{name}.weight" for name in named), torch.split(weight, sizes), strict=True))
        linear = TorchLinear(weight, biases)
        self.modules[id(linear)] = named
        if is_quantized:
            self.places.append(QuantizedPlace(linear, named))
        return linear

    def stack(self, matrices: Sequence[tuple[Weights, dict[str, int]]], inputs: int) -> list[Linear]:
        """Matrices of one size as parts of one tensor: the `parts` of each, and the weights that they are relative to.

        If some are quantised, they are tensors of their own.
        """
        if any(weights.prefix + name in self.quantized for weights, parts in matrices for name in parts):
            return [weights.linear(parts, inputs) for weights, parts in matrices]
        stack = self.empty(len(matrices), sum(matrices[0][1].values()), inputs)
        return [
            weights.linear(parts, inputs, memory=part) for (weights, parts), part in zip(matrices, stack, strict=True)
        ]

    def quantized_stack(
        self,
        size: tuple[int, int],
        biases: torch.Tensor,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[..., Iterable[QuantizedWeight]],
    ) -> list[Linear]:
        """Matrices `[out, in]` of this size, of which the loader has `read` make the quantised form.

        `read` takes the tensors that have these names and shapes, in their order. biases: `[matrices, out]`.
        """
        linears = [TorchLinear(torch.empty(size, dtype=self.dtype, device="meta"), bias) for bias in biases]
        self.stacked.append(StackedPlace(linears, self._named(shapes), read))
        return [*linears]

    def name_parts(self, experts: Sequence[Linear], parts: dict[str, int]) -> None:
        """What each expert's matrix is fused of, where the checkpoint has those of all experts in one tensor."""
        for number, linear in enumerate(experts):
            self.modules[id(linear)] = {f"{self.prefix}{number}.{name}": outputs for name, outputs in parts.items()}

    def compute(self, shapes: Mapping[str, tuple[int, ...]], fill: Callable[..., object]) -> None:
        """Have the loader call `fill` with the tensors that have these names and shapes, in their order."""
        self.computed.append(ComputedPlace(self._named(shapes), fill))

    def _named(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {self.prefix + name: shape for name, shape in shapes.items()}

    def when_filled(self, change: Callable[[], object]) -> None:
        """Have `finish` call `change`."""
        self._finishing.append(change)

    def finish(self) -> None:
        for change in self._finishing:
            change()
