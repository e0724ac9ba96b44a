"""Low-rank adapters (LoRA, Hu et al., 2021): slots of a fixed size beside a model's matrices, and their products.

A matrix `W` with an adapter computes `W x + scale * B (A x)`. The slots are allocated once, so their memory is known
before that of the KV cache. The tokens of a step are sorted by adapter, so that each adapter's rows are one range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from llmservice_server.backend.base import Model, RowFactors, each_linear
from llmservice_server.backend.experts import Experts, LowRankExperts
from llmservice_server.backend.layers import LayerOps, Linear
from llmservice_server.backend.quantized import QuantizedLinear

_MOST_RANKS = 256
"""Of all slots together, where steps multiply with all of them: a few hundredths of the work of a model 4096 wide."""


def can_apply_by_row(num_slots: int, max_rank: int, *, with_experts: bool) -> bool:
    """Whether `AdapterSlots.by_row` has all that adapters change, and takes little time beside the model."""
    return not with_experts and num_slots * max_rank <= _MOST_RANKS


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

    down: torch.Tensor  # [at most parts * max_rank, in]
    ups: list[tuple[slice, slice, torch.Tensor]]  # columns of the stacked product, outputs, [rank, out]

    def add_to(self, product: torch.Tensor, hidden: torch.Tensor) -> None:
        low = hidden.to(self.down.dtype) @ self.down.t()
        for columns, outputs, up in self.ups:
            _add_product(product[:, outputs], low[:, columns], up)


def _add_product(product: torch.Tensor, low: torch.Tensor, up: torch.Tensor) -> None:
    """`product` may be float32 where the factors are not, as may be what is multiplied (HunYuan's routers)."""
    if product.dtype == up.dtype:
        product.addmm_(low, up)
    else:
        product += low @ up


@dataclass(slots=True)
class _Rows:
    """Those of the step that is computed, which all matrices share."""

    current: Sequence[SlotRows] = ()
    others: torch.Tensor | None = None  # instead: whether a row lacks the adapter in a slot, [num_rows, slots]


@dataclass(slots=True)
class LoraLinear:
    """Implements `Linear`: a matrix, and the adapters of the rows that use some."""

    base: Linear
    bias: torch.Tensor | None  # of `base`
    rows: _Rows
    slots: _Slots

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        product = self.base(hidden)
        self.add_to(product, lambda: hidden)
        return product

    def add_to(self, product: torch.Tensor, hidden: Callable[[], torch.Tensor]) -> None:
        """What the adapters of the rows change in the base's product of `hidden`."""
        if (others := self.rows.others) is not None:
            self.slots.add_by_row(product, hidden(), others)
            return
        factors = self.slots.factors
        changes = [(rows, change) for slot, rows in self.rows.current if (change := factors[slot]) is not None]
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


@dataclass(slots=True, kw_only=True)
class LoraExperts(Experts):
    """A layer's experts, and what the adapters of the rows that use some add to them."""

    base: Experts
    rows: _Rows
    changes: list[LowRankExperts | None]  # by slot; None: its adapter does not change these experts

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, ops: LayerOps
    ) -> torch.Tensor:
        """Rows without an adapter are computed as always; they come first."""
        current = self.rows.current
        if all(self.changes[slot] is None for slot, _ in current):
            return self.base(hidden, chosen, weights, ops)
        first = current[0].rows.start
        adapted = [(slice(part.start - first, part.stop - first), self.changes[slot]) for slot, part in current]
        sums = torch.empty_like(hidden)
        if first:
            sums[:first] = self.base(hidden[:first], chosen[:first], weights[:first], ops)
        sums[first:] = self.base.adapted(hidden[first:], chosen[first:], weights[first:], ops, adapted)
        return sums

    @property
    def nbytes(self) -> int:
        return self.base.nbytes


@dataclass(frozen=True, slots=True)
class Adaptable:
    """A matrix that adapters may change, unless it has no `parts`."""

    parts: Mapping[str, int]  # modules of the checkpoint, with the outputs of each, in order
    inputs: int


@dataclass(frozen=True, slots=True)
class AdaptableExperts:
    """The experts of a layer."""

    gate_up: list[Adaptable]
    down: list[Adaptable]

    def shapes(self, rank: int) -> list[tuple[int, int, int]]:
        """Of the factors of a slot, in the order of `LowRankExperts`."""
        count, hidden, width = len(self.gate_up), self.gate_up[0].inputs, self.down[0].inputs
        gate_up = (count, 2 * rank, hidden), (count, 2 * width, 2 * rank)
        return [*gate_up, (count, rank, width), (count, hidden, rank)]

    def take(self, modules: dict[str, LowRank], rank: int, dtype: torch.dtype) -> LowRankExperts | None:
        """The factors of all experts, each of `rank` or less, out of `modules`; None: there are none."""
        if not any(name in modules for each in (*self.gate_up, *self.down) for name in each.parts):
            return None
        taken = LowRankExperts.of(torch.zeros(shape, dtype=dtype) for shape in self.shapes(rank))
        for linears, (downs, ups) in ((self.gate_up, taken.gate_up), (self.down, taken.down)):
            for linear, down, up in zip(linears, downs, ups, strict=True):
                first = 0
                for number, (name, outputs) in enumerate(linear.parts.items()):
                    if (given := modules.pop(name, None)) is not None:
                        columns = slice(number * rank, number * rank + len(given.down))
                        down[columns] = given.down
                        up[first : first + outputs, columns] = given.up
                    first += outputs
        return taken


@dataclass(frozen=True, slots=True)
class Adaptables:
    """What adapters may change in a model, in the order of `map_linears`, `mixtures` and `plain_matrices`."""

    linears: list[Adaptable]  # experts' matrices have no parts here
    experts: list[AdaptableExperts]
    plain: list[Adaptable]
    alternates: bool  # as of `Experts`
    renamed: Callable[[str], list[str]]  # as of `Model`

    @classmethod
    def of(cls, model: Model) -> Adaptables:
        """To be called before the backend converts the matrices, while shapes can be read."""
        by_linear = {
            id(linear): Adaptable(parts, _num_inputs(linear))
            for linear, parts in zip(each_linear(model), model.modules, strict=True)
        }
        mixtures = [mixture.experts for mixture in model.mixtures()]
        experts = [
            AdaptableExperts(*([by_linear.pop(id(each)) for each in linears] for linears in (one.gate_up, one.down)))
            for one in mixtures
        ]
        return cls(
            [by_linear.get(id(linear), Adaptable({}, 0)) for linear in each_linear(model)],
            experts,
            [Adaptable({each.name: each.weight.shape[0]}, each.weight.shape[1]) for each in model.plain_matrices()],
            any(one.alternates for one in mixtures),
            model.renamed,
        )


def _num_inputs(linear: Linear) -> int:
    return (linear.quantized if isinstance(linear, QuantizedLinear) else linear.weight).shape[1]


@dataclass(slots=True)
class _Slots:
    """The memory of all slots beside one matrix: of each of its parts, factors of `max_rank`, or less and zeros."""

    adaptable: Adaptable
    downs: torch.Tensor  # [slots, parts * max_rank, in]
    ups: list[torch.Tensor]  # of each part, [slots, max_rank, out]
    factors: list[_Factors | None]  # by slot; None: its adapter does not change this matrix

    @classmethod
    def of(
        cls, adaptable: Adaptable, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> _Slots:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        parts = adaptable.parts
        ups = [zeros(max_rank, outputs) for outputs in parts.values()]
        return cls(adaptable, zeros(len(parts) * max_rank, adaptable.inputs), ups, [None] * num_slots)

    @property
    def nbytes(self) -> int:
        return self.downs.nbytes + sum(up.nbytes for up in self.ups)

    def put(self, slot: int, modules: Mapping[str, LowRank]) -> None:
        down, ends = self.downs[slot].zero_(), accumulate(self.adaptable.parts.values())
        parts = enumerate(zip(self.adaptable.parts, ends, strict=True))
        changed = [(number, end, modules[name]) for number, (name, end) in parts if name in modules]
        self.factors[slot] = None
        if not changed:
            return
        max_rank = self.ups[0].shape[1]
        begin, ups = changed[0][0] * max_rank, []
        for number, end, given in changed:
            rank, first = len(given.down), number * max_rank
            down[first : first + rank] = given.down
            up = self.ups[number][slot, :rank].copy_(given.up)
            ups.append((slice(first - begin, first - begin + rank), slice(end - up.shape[1], end), up))
        self.factors[slot] = _Factors(down[begin:][: ups[-1][0].stop], ups)

    def changes(self, rows: _Rows) -> Iterator[RowFactors]:
        """Of a matrix of one part."""
        if (others := rows.others) is not None:
            down, up = self.downs.flatten(0, 1), self.ups[0].flatten(0, 1)
            yield RowFactors(slice(None), down, up, others.repeat_interleave(self.ups[0].shape[1], dim=1))
            return
        for slot, part in rows.current:
            if (change := self.factors[slot]) is not None:
                yield RowFactors(part, change.down, change.ups[0][-1])

    def add_by_row(self, product: torch.Tensor, hidden: torch.Tensor, others: torch.Tensor) -> None:
        """The factors of all slots are multiplied with all rows, and of each row those of one are kept.

        So the work is always the same. others: `[num_rows, slots]`.
        """
        (num_rows, num_slots), parts = others.shape, len(self.ups)
        low = (hidden.to(self.downs.dtype) @ self.downs.flatten(0, 1).t()).view(num_rows, num_slots, parts, -1)
        low = low.masked_fill_(others[:, :, None, None], 0).transpose(1, 2).reshape(num_rows, parts, -1)
        first = 0
        for number, up in enumerate(self.ups):
            end = first + up.shape[-1]
            _add_product(product[:, first:end], low[:, number], up.flatten(0, 1))
            first = end


@dataclass(slots=True)
class _ExpertSlots:
    """The memory of all slots beside the experts of one layer."""

    adaptable: AdaptableExperts
    memory: list[torch.Tensor]  # [slots, ...], of `AdaptableExperts.shapes`
    changes: list[LowRankExperts | None]

    def put(self, slot: int, given: LowRankExperts | None) -> None:
        self.changes[slot] = None
        if given is not None:
            parts = (*given.gate_up, *given.down)
            copies = (memory[slot].copy_(part) for memory, part in zip(self.memory, parts, strict=True))
            self.changes[slot] = LowRankExperts.of(copies)


class PackedAdapter(NamedTuple):
    """What a slot gets."""

    modules: Mapping[str, LowRank]  # with `up` as slots have it, [rank, out]
    experts: Sequence[LowRankExperts | None]  # of each layer that has some


class AdapterSlots:
    """`num_slots` adapters of rank `max_rank` or less beside what adapters may change in a model."""

    def __init__(
        self,
        adaptables: Adaptables,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        with_experts: bool,
    ) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.adaptables = adaptables if with_experts else replace(adaptables, experts=[])
        elements = sum(math.prod(shape) for each in adaptables.experts for shape in each.shapes(max_rank))
        self.lacking_bytes = 0 if with_experts else elements * dtype.itemsize
        """Of each slot, so that it would hold factors of experts too."""
        self._rows = _Rows()

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(num_slots, *shape, dtype=dtype, device=device)

        changed = (*adaptables.linears, *adaptables.plain)
        self._slots = [_Slots.of(each, num_slots, max_rank, dtype, device) for each in changed]
        self._numbers = torch.arange(num_slots, dtype=torch.int32, device=device)
        self._expert_slots = [
            _ExpertSlots(each, [empty(*shape) for shape in each.shapes(max_rank)], [None] * num_slots)
            for each in self.adaptables.experts
        ]

    @property
    def nbytes(self) -> int:
        experts = sum(part.nbytes for each in self._expert_slots for part in each.memory)
        return experts + sum(each.nbytes for each in self._slots)

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """The modules of the checkpoint that an adapter may change, with their outputs and inputs."""
        experts = (one for each in self.adaptables.experts for one in (*each.gate_up, *each.down))
        return {
            name: (outputs, each.inputs)
            for each in (*self.adaptables.linears, *experts, *self.adaptables.plain)
            for name, outputs in each.parts.items()
        }

    def install(self, model: Model) -> None:
        """Wrap the model's matrices. To be called once, after decode paths have read them."""
        slots = iter(self._slots)

        def wrapped(linear: Linear) -> Linear:
            each = next(slots)
            return LoraLinear(linear, linear.bias, self._rows, each) if each.adaptable.parts else linear

        model.map_linears(wrapped)
        for matrix, of_matrix in zip(model.plain_matrices(), slots, strict=True):
            matrix.changes = partial(of_matrix.changes, self._rows)
        for mixture, each in zip(model.mixtures(), self._expert_slots, strict=False):
            base = mixture.experts
            parts = base.gate_up, base.down, base.activation, base.alternates
            mixture.experts = LoraExperts(*parts, base=base, rows=self._rows, changes=each.changes)

    def pack(self, modules: dict[str, LowRank]) -> PackedAdapter:
        """On the host, so that `put` only copies. `modules` is used up, so that little is held twice."""
        experts = [each.take(modules, self.max_rank, self.dtype) for each in self.adaptables.experts]
        for name, (down, up) in modules.items():
            modules[name] = LowRank(down, up.t().contiguous())
        return PackedAdapter(modules, experts)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """Replace the adapter in `slot`. No request may use it."""
        for each in self._slots:
            each.put(slot, adapter.modules)
        for experts, given in zip(self._expert_slots, adapter.experts, strict=True):
            experts.put(slot, given)

    @contextmanager
    def applied(self, rows: Sequence[SlotRows]) -> Iterator[None]:
        """Within it, the model's products include the adapters of these `rows`."""
        before, self._rows.current = self._rows.current, rows
        try:
            yield
        finally:
            self._rows.current = before

    @property
    def apply_by_row(self) -> bool:
        return can_apply_by_row(self.num_slots, self.max_rank, with_experts=bool(self._expert_slots))

    @contextmanager
    def by_row(self, slots: torch.Tensor) -> Iterator[None]:
        """Implements `RowAdapters`."""
        before, self._rows.others = self._rows.others, slots[:, None] != self._numbers
        try:
            yield
        finally:
            self._rows.others = before

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Implements `RowAdapters`."""
        random = torch.Generator(self._numbers.device).manual_seed(0)
        for each in self._slots:
            each.downs.normal_(std=max(1, each.adaptable.inputs) ** -0.5, generator=random)
            for up in each.ups:
                up.normal_(std=self.max_rank**-0.5, generator=random)
        try:
            yield
        finally:
            for each in self._slots:
                for part in (each.downs, *each.ups):
                    part.zero_()
