"""A device on the CPU that computes as late as CUDA may: its work is queued, and runs when the host waits for it.

A tensor of device `cuda` has its shape at once and its numbers late. Until the host waits, a copy has not read its
pinned source and has not written its pinned destination; fresh memory holds `POISON`. The order of streams is checked
when work is launched, with vector clocks, as `torch.cuda._sanitizer` does. Device memory that is freed while another
stream may still use it holds `POISON` for that stream.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

import harness.gpu.triton_interpreter  # noqa: F401
from llmservice_server.backend import transfer

CUDA = torch.device("cuda", 0)
POISON = 0x7F  # each byte: integers beyond any index, and floats near the largest
_ATEN = torch.ops.aten
Clock = dict["Stream", float]


class OrderError(BaseException):
    """Memory is used in no defined order. Not an Exception, after which the engine would compute the step again."""


class Memory:
    """Device memory, or pinned host memory, and the work that used it last, by stream."""

    def __init__(self, num_bytes: int, device: LateDevice) -> None:
        self.storage = torch.full((num_bytes,), POISON, dtype=torch.uint8).untyped_storage()
        self.stream, self.device = device.current, device
        self.written: tuple[Stream, float] = self.stream, self.stream.clock[self.stream]
        self.read: Clock = {}

    def __del__(self) -> None:
        for work in self.device.pending:
            if work.stream is not self.stream and not _before((work.stream, work.tick), self.stream.clock):
                work.reused += [storage for storage in work.storages if storage.data_ptr() == self.storage.data_ptr()]


@dataclass(frozen=True, eq=False)
class Place:
    """A tensor in memory, without the right to keep it."""

    meta: torch.Tensor
    storage: torch.UntypedStorage

    def tensor(self) -> torch.Tensor:
        meta = self.meta
        return torch.empty(0, dtype=meta.dtype).set_(self.storage, meta.storage_offset(), meta.size(), meta.stride())


class LateTensor(torch.Tensor):
    """On the device; `meta` has its shape and strides. To torch's own code it is of `meta`, which every build has."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    meta: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, meta: torch.Tensor, memory: Memory) -> LateTensor:
        made: LateTensor = torch.Tensor._make_wrapper_subclass(
            cls, meta.size(), meta.stride(), meta.storage_offset(), dtype=meta.dtype, device="meta"
        )
        made.meta, made.memory = meta, memory
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def place(self) -> Place:
        return Place(self.meta, self.memory.storage)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """In another thread, where no mode is active."""
        late = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LateTensor))
        with late.memory.device:
            return operator(*args, **kwargs or {})


class Event:
    def __init__(self, device: LateDevice) -> None:
        self.device, self.clock = device, Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.device.current).clock)

    def synchronize(self) -> None:
        self.device.wait(self.clock)


class Stream:
    def __init__(self, device: LateDevice) -> None:
        self.device, self.clock = device, Clock({self: 0})

    def wait_stream(self, other: Stream) -> None:
        _merge(self.clock, other.clock)


class Graph:
    """A CUDA graph: what was launched during its capture."""

    def __init__(self, device: LateDevice) -> None:
        self.device, self.launches = device, list[tuple[Any, ...]]()

    def replay(self) -> None:
        for launch in self.launches:
            self.device.launch(*launch)


@dataclass(eq=False)
class Work:
    run: Callable[[], object]
    stream: Stream
    tick: float
    storages: list[torch.UntypedStorage]
    reused: list[torch.UntypedStorage] = field(default_factory=list)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


def _before(use: tuple[Stream, float], clock: Clock) -> bool:
    return use[1] <= clock.get(use[0], 0)


class LateDevice(TorchDispatchMode):
    """Made by `late_device`. `num_waits` counts copies that kept the host waiting, events that it waited for not."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Work] = []
        self.num_waits = 0
        self.current = Stream(self)
        self._host: Clock = {}  # what the host has waited for
        self._pinned: dict[int, Memory] = {}  # by address; kept, so that no address has two meanings
        self._graph: Graph | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it takes seconds to import

    @property
    def is_capturing(self) -> bool:
        return self._graph is not None

    def launch(self, run: Callable[[], object], reads: Sequence[Memory], writes: Sequence[Memory]) -> None:
        """Queue work on the current stream; raises OrderError where other streams' work may come before or after."""
        if self._graph is not None:
            self._graph.launches.append((run, reads, writes))
            return
        stream = self.current
        _merge(stream.clock, self._host)
        stream.clock[stream] += 1
        tick = stream.clock[stream]
        for memory in (*reads, *writes):
            uses = [memory.written, *(memory.read.items() if memory in writes else ())]
            if not all(_before(use, stream.clock) for use in uses):
                raise OrderError("this stream does not wait for the work on another one that uses the same memory")
        for memory in reads:
            memory.read[stream] = tick
        for memory in writes:
            memory.written, memory.read = (stream, tick), {}
        self.pending.append(Work(run, stream, tick, [memory.storage for memory in (*reads, *writes)]))

    @torch.inference_mode()
    def wait(self, clock: Clock | None = None) -> None:
        """Run the work up to `clock`, and no other; all of it if None."""
        due = [work for work in self.pending if clock is None or _before((work.stream, work.tick), clock)]
        self.pending = [work for work in self.pending if work not in due]
        with _disable_current_modes():
            for work in due:
                for storage in work.reused:
                    storage.fill_(POISON)
                work.run()
                _merge(self._host, {work.stream: work.tick})

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capturing(self, graph: Graph, pool: object = None, stream: Stream | None = None) -> Iterator[None]:
        self._graph = graph
        try:
            with self.on(stream or self.current):
                yield
        finally:
            self._graph = None

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        late = [each for each in tensors if isinstance(each, LateTensor)]
        there = torch.device(kwargs.get("device") or "cpu").type != "cpu"
        if there:
            kwargs["device"] = CUDA
        if operator in (_ATEN.pin_memory.default, _ATEN._pin_memory.default):
            return self._pin(args[0].shape, args[0].dtype).copy_(args[0])
        if operator is _ATEN.empty.memory_format and kwargs.get("pin_memory") and not there:
            return self._pin(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if not late and not there:
            return operator(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
            with self:
                return operator.decompose(*args, **kwargs)
        if operator is _ATEN.empty_like.default and not there and "device" in kwargs:
            return (self._pin if kwargs.get("pin_memory") else torch.empty)(args[0].shape, dtype=args[0].dtype)
        from_host = any(not isinstance(each, LateTensor) and each.dim() > 0 for each in tensors)
        if from_host and operator not in (_ATEN._to_copy.default, _ATEN.copy_.default):
            raise RuntimeError(f"{operator} takes a tensor of the host, whose copy keeps the host waiting")
        return self._on_device(operator, args, kwargs, late, there)

    def _on_device(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], late: list[LateTensor], there: bool
    ) -> Any:
        """An operator of torch's, none that is composed of others."""
        if operator is _ATEN._local_scalar_dense.default:
            return self._copied(args[0], non_blocking=False).item()
        if operator is _ATEN._to_copy.default and (not late or (kwargs.get("device") and not there)):
            return self._copied(args[0], non_blocking=kwargs.get("non_blocking", False), dtype=kwargs.get("dtype"))
        if operator is _ATEN.copy_.default and len(late) == 1 and args[1].dim() > 0:
            return self._copy(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        known = {each.meta.untyped_storage()._cdata: each.memory for each in late}
        outer = {id(each.meta): each for each in late}
        arguments = args, {name: None if name == "pin_memory" else value for name, value in kwargs.items()}
        meta_args, meta_kwargs = tree_map_only(LateTensor, lambda each: each.meta, arguments)
        made: list[LateTensor] = []

        def wrapped(meta: torch.Tensor) -> torch.Tensor:
            if id(meta) in outer:
                return outer[id(meta)]
            memory = known.get(meta.untyped_storage()._cdata)
            if memory is not None:
                return LateTensor(meta, memory)
            made.append(self._new(meta))
            return made[-1]

        result = tree_map_only(
            torch.Tensor, wrapped, operator(*meta_args, **meta_kwargs | ({"device": "meta"} if there else {}))
        )
        written = _written(operator, args, kwargs)
        if (not made and not written) or operator.name().startswith(("aten::empty", "aten::new_empty")):
            return result
        host = tree_map_only(LateTensor, lambda each: each.place, arguments)
        targets = [each.place for each in made]

        def run() -> None:
            real_args, real_kwargs = _real(host)
            results = tree_leaves(operator(*real_args, **real_kwargs | ({"device": "cpu"} if there else {})))
            for target, computed in zip(targets, results if targets else (), strict=True):
                target.tensor().copy_(computed)

        reads = [each.memory for each in late if each.memory not in written]
        self.launch(run, reads, [*written, *(each.memory for each in made)])
        return result

    def _copied(self, source: torch.Tensor, *, non_blocking: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Between the host and the device; as torch does, what is copied to the host without waiting is pinned."""
        dtype = dtype or source.dtype
        if not isinstance(source, LateTensor):
            target: torch.Tensor = self._new(torch.empty_like(source, dtype=dtype, device="meta"))
        else:
            target = self._pin(source.shape, dtype) if non_blocking else torch.empty(source.shape, dtype=dtype)
        return self._copy(target, source, non_blocking)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        to_host = not isinstance(target, LateTensor)
        host, there = (target, source) if to_host else (source, target)
        assert isinstance(there, LateTensor)
        address = host.untyped_storage().data_ptr()
        pinned = self._pinned.get(address)
        memories = [] if pinned is None else [pinned]
        place, where = there.place, "".join(traceback.format_stack(limit=12))
        queued = any(address == storage.data_ptr() for work in self.pending for storage in work.storages)
        before = None if queued else host.clone()  # queued work may write the source before the copy reads it

        def run() -> None:
            if to_host:
                host.copy_(place.tensor())
                return
            if before is not None and not torch.equal(_bytes(before), _bytes(host)):
                raise OrderError(f"the host has changed the source of a copy before it was read; launched at\n{where}")
            place.tensor().copy_(host)

        self.launch(run, *(([there.memory], memories) if to_host else (memories, [there.memory])))
        if pinned is None or not non_blocking:
            self.num_waits += 1
            self.wait(self.current.clock)
        return target

    def _new(self, meta: torch.Tensor) -> LateTensor:
        return LateTensor(meta, Memory(meta.untyped_storage().nbytes(), self))

    def _pin(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        like = torch.empty(size, dtype=dtype, device="meta")
        memory = Memory(like.untyped_storage().nbytes(), self)
        self._pinned[memory.storage.data_ptr()] = memory
        return Place(like, memory.storage).tensor()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _real(arguments: Any) -> Any:
    return tree_map_only(Place, lambda place: place.tensor(), arguments)


def _written(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Memory]:
    parameters = operator._schema.arguments
    given = zip(parameters, args, strict=False)
    values = [*given, *((each, kwargs[each.name]) for each in parameters if each.name in kwargs)]
    return [
        leaf.memory
        for parameter, value in values
        if parameter.alias_info is not None and parameter.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, LateTensor)
    ]


@contextmanager
def late_device() -> Iterator[LateDevice]:
    """Within it `cuda` is a LateDevice; at its end all work runs. Triton's kernels are interpreted."""
    from triton.runtime.interpreter import InterpretedFunction

    device = LateDevice()
    run_kernel, make_tensor = InterpretedFunction.run, torch.tensor

    def run(kernel: Any, *args: Any, **settings: Any) -> None:
        memories = [leaf.memory for leaf in tree_leaves(args) if isinstance(leaf, LateTensor)]
        places = tree_map_only(LateTensor, lambda late: late.place, args)
        device.launch(lambda: run_kernel(kernel, *_real(places), **settings), [], memories)

    def tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = make_tensor(data, **kwargs)
        return (made.pin_memory() if pin_memory else made).to(device or "cpu")

    cuda = {
        "Stream": lambda *_: Stream(device),
        "Event": lambda *_: Event(device),
        "CUDAGraph": lambda: Graph(device),
        "stream": device.on,
        "graph": device.capturing,
        "graph_pool_handle": lambda: None,
        "current_stream": lambda *_: device.current,
        "synchronize": lambda *_: device.wait(),
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=2),
    }
    if not torch.cuda.is_available():
        cuda["_lazy_init"] = lambda: None
    transfer._side_stream.cache_clear()
    with ExitStack() as stack:
        for where, names in ((InterpretedFunction, {"run": run}), (torch, {"tensor": tensor}), (torch.cuda, cuda)):
            stack.enter_context(mock.patch.multiple(where, **names))
        stack.callback(transfer._side_stream.cache_clear)
        stack.enter_context(device)
        yield device
        device.wait()
