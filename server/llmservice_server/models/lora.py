"""Low-rank adapters (LoRA, Hu et al., 2021): slots of a fixed size beside a model's matrices, and their products.

A matrix `W` with an adapter computes `W x + scale * B (A x)`. The slots are allocated once, so their memory is known
before that of the KV cache. The tokens of a step are sorted by adapter, so that each adapter's rows are one range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from llmservice_server.backend.base import Linear, Model, each_linear
from llmservice_server.backend.quantized import QuantizedLinear


class LowRank(NamedTuple):
    """The two factors of a module's change."""

    down: torch.Tensor  # A, [rank, in]
    up: torch.Tensor  # B times the scale, [out, rank]


class SlotRows(NamedTuple):
    """The rows of a step that use the adapter in a slot."""

    slot: int
    rows: slice


@dataclass(slots=True)
class _Factors:
    """An adapter's factors of one fused matrix: those `down` are stacked, so that the input is multiplied once."""

    down: torch.Tensor  # [parts * rank, in]
    ups: list[tuple[slice, slice, torch.Tensor]]  # columns of the stacked product, outputs, [out, rank]

    def add_to(self, product: torch.Tensor, hidden: torch.Tensor) -> None:
        """`product` may be float32 where the factors are not."""
        low = hidden @ self.down.t()
        for columns, outputs, up in self.ups:
            if product.dtype == up.dtype:
                product[:, outputs].addmm_(low[:, columns], up.t())
            else:
                product[:, outputs] += low[:, columns] @ up.t()


@dataclass(slots=True)
class _Rows:
    """Those of the step that is computed, which all matrices share."""

    current: Sequence[SlotRows] = ()


@dataclass(slots=True)
class LoraLinear:
    """Implements `Linear`: a matrix, and the adapters of the rows that use some."""

    base: Linear
    bias: torch.Tensor | None  # of `base`
    rows: _Rows
    factors: list[_Factors | None]  # by slot; None: its adapter does not change this matrix

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        product = self.base(hidden)
        self.add_to(product, lambda: hidden)
        return product

    def add_to(self, product: torch.Tensor, hidden: Callable[[], torch.Tensor]) -> None:
        """What the adapters of the rows change in the base's product of `hidden`."""
        changes = [(rows, change) for slot, rows in self.rows.current if (change := self.factors[slot]) is not None]
        if changes:
            states = hidden()
            for rows, change in changes:
                change.add_to(product[rows], states[rows])

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def nbytes(self) -> int:
        return self.base.nbytes


@dataclass(frozen=True, slots=True)
class Adaptable:
    """A matrix that adapters may change, unless it has no `parts`."""

    parts: Mapping[str, int]  # modules of the checkpoint, with the outputs of each, in order
    inputs: int

    @classmethod
    def all_of(cls, model: Model) -> list[Adaptable]:
        """In the order of `map_linears`; to be called before the backend converts them, while shapes can be read."""
        shapes = (
            linear.quantized.shape if isinstance(linear, QuantizedLinear) else linear.weight.shape
            for linear in each_linear(model)
        )
        return [cls(parts, shape[1]) for parts, shape in zip(model.modules, shapes, strict=True)]

    def num_elements(self, rank: int) -> int:
        return rank * sum(self.inputs + outputs for outputs in self.parts.values())


@dataclass(slots=True)
class _Slots:
    """The memory of all slots beside one matrix."""

    adaptable: Adaptable
    memory: torch.Tensor  # [slots, elements]
    factors: list[_Factors | None] = field(default_factory=list)

    def put(self, slot: int, modules: Mapping[str, LowRank]) -> None:
        parts = self.adaptable.parts
        changed = [(name, modules[name]) for name in parts if name in modules]
        if not changed:
            self.factors[slot] = None
            return
        ends = dict(zip(parts, torch.tensor([*parts.values()]).cumsum(0).tolist(), strict=True))
        downs = torch.cat([each.down for _, each in changed])
        down = self.memory[slot, : downs.numel()].view_as(downs).copy_(downs)
        ups, first, column = [], downs.numel(), 0
        for name, (_, given) in changed:
            outputs, rank = given.shape
            up = self.memory[slot, first : first + given.numel()].view_as(given).copy_(given)
            ups.append((slice(column, column + rank), slice(ends[name] - outputs, ends[name]), up))
            first, column = first + given.numel(), column + rank
        self.factors[slot] = _Factors(down, ups)


class AdapterSlots:
    """`num_slots` adapters of rank `max_rank` or less beside each of a model's `adaptables`."""

    def __init__(
        self,
        adaptables: Sequence[Adaptable],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self._rows = _Rows()
        self._slots = [
            _Slots(
                each,
                torch.empty(num_slots, each.num_elements(max_rank), dtype=dtype, device=device),
                [None] * num_slots,
            )
            for each in adaptables
        ]

    @property
    def nbytes(self) -> int:
        return sum(each.memory.nbytes for each in self._slots)

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """The modules of the checkpoint that an adapter may change, with their outputs and inputs."""
        return {
            name: (outputs, each.adaptable.inputs)
            for each in self._slots
            for name, outputs in each.adaptable.parts.items()
        }

    def install(self, model: Model) -> None:
        """Wrap the model's matrices. To be called once, after decode paths have read them."""
        slots = iter(self._slots)

        def wrapped(linear: Linear) -> Linear:
            each = next(slots)
            return LoraLinear(linear, linear.bias, self._rows, each.factors) if each.adaptable.parts else linear

        model.map_linears(wrapped)

    def put(self, slot: int, modules: Mapping[str, LowRank]) -> None:
        """Replace the adapter in `slot`. No request may use it."""
        for each in self._slots:
            each.put(slot, modules)

    @contextmanager
    def applied(self, rows: Sequence[SlotRows]) -> Iterator[None]:
        """Within it, the model's products include the adapters of these `rows`."""
        before, self._rows.current = self._rows.current, rows
        try:
            yield
        finally:
            self._rows.current = before
