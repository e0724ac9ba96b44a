"""The LoRA adapters that requests may name: which exist, which are in the device's slots, and who waits for one.

An adapter that is evicted keeps its name: the next request for it has it read from its folder again.
"""

from __future__ import annotations

import itertools
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmservice_server.types.errors import AdapterError, request_failure
from llmservice_server.types.messages import AdapterInfo, AdapterReport, AdapterState, LoadAdapter, UnloadAdapter

if TYPE_CHECKING:
    from llmservice_server.engine.interfaces import AdapterStore, AdapterWeights
    from llmservice_server.engine.request import Request

_IDLE_WAIT_S = 0.05  # for files where there is nothing else to do; messages wait as long


@dataclass(slots=True, eq=False)
class Adapter:
    """One version of a named adapter."""

    name: str
    folder: str
    version: str  # a hash of its files
    pinned: bool  # never evicted
    slot: int | None = None  # None: its weights are not on the device
    num_requests: int = 0  # that compute with it
    last_used: int = 0  # the smallest is evicted first

    @property
    def key(self) -> str:
        """What keys and values in the prefix cache depend on."""
        return adapter_key(self.name, self.version)

    @property
    def info(self) -> AdapterInfo:
        state: AdapterState = "evicted" if self.slot is None else "loaded"
        return AdapterInfo(self.name, self.version, state, self.folder, self.pinned)


def adapter_key(name: str, version: str) -> str:
    """What the prefix cache knows a version by; a name has no spaces."""
    return f"{name} {version}"


class Adapters:
    """`store` None: there are no slots, and every adapter is refused.

    Requests for adapters without a slot wait in order of arrival. While the first of them waits for a slot, later
    requests for adapters that could be evicted wait as well, so that one of these becomes idle.

    One adapter is read at a time, and the next one when it is in its slot, as start-up sets memory aside for one.
    """

    def __init__(self, store: AdapterStore[Any] | None) -> None:
        self._store = store
        self._free = list(range(store.num_slots)) if store is not None else []
        self._by_name: dict[str, Adapter] = {}
        self._draining: set[Adapter] = set()  # unloaded or replaced, but some requests still compute with it
        self._waiting: list[Request] = []
        self._unread: deque[LoadAdapter | Adapter] = deque()
        self._reading: tuple[LoadAdapter | Adapter, Future[AdapterWeights]] | None = None
        self._slots: dict[Adapter, int] = {}  # that evicted ones will have when they are read again
        self._reports: list[AdapterReport] = []
        self._ticks = itertools.count(1)

    def __bool__(self) -> bool:
        """Whether there is something to do or to report."""
        return bool(self._waiting or self._unread or self._reading or self._reports)

    def change(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Begin to load, or unload; the result is one of `take_reports`."""
        if self._store is None:
            self._report(message, "this server has no slots for adapters: start it with --max-loras")
        elif isinstance(message, LoadAdapter):
            self._unread.append(message)
            self._read_next()
        elif (adapter := self._by_name.pop(message.name, None)) is None:
            self._report(message, f"the adapter {message.name} is not loaded", status=404)
        else:
            self._retire(adapter)
            self._report(message)

    def take_reports(self) -> list[AdapterReport]:
        reports, self._reports = self._reports, []
        return reports

    def why_refused(self, name: str) -> str | None:
        return None if name in self._by_name else f"the adapter {name} is not loaded"

    def add(self, request: Request) -> None:
        """Queue a request until its adapter is on the device."""
        self._waiting.append(request)

    def discard(self, request: Request) -> bool:
        """A request has ended: its adapter may be evicted. True where it was waiting here."""
        if request in self._waiting:
            self._waiting.remove(request)
            return True
        adapter, request.adapter = request.adapter, None
        if adapter is not None:
            adapter.num_requests -= 1
            if adapter in self._draining and not adapter.num_requests:
                self._draining.remove(adapter)
                self._release(adapter)
        return False

    def take_ready(self, *, idle: bool) -> list[tuple[Request, str | None]]:
        """Requests whose adapter is on the device, with None or the error; `idle`: wait up to 50 ms for files."""
        if idle and self._reading is not None:
            wait([self._reading[1]], _IDLE_WAIT_S)
        failures = self._finish_read()
        waiting, self._waiting = self._waiting, []
        ready: list[tuple[Request, str | None]] = []
        blocked = False
        for request in waiting:
            name = request.adapter_name or ""
            adapter = self._by_name.get(name)
            problem = failures.get(name) or self.why_refused(name)
            if problem is not None or adapter is None:
                ready.append((request, problem))
                continue
            if adapter.slot is None and adapter not in self._slots and not blocked:
                blocked = not self._read_again(adapter)
            if adapter.slot is None or (blocked and not adapter.pinned):
                self._waiting.append(request)
            else:
                self._acquire(adapter, request)
                ready.append((request, None))
        self._read_next()
        return ready

    def _acquire(self, adapter: Adapter, request: Request) -> None:
        adapter.num_requests += 1
        adapter.last_used = next(self._ticks)
        request.adapter = adapter
        if request.adapter_version != adapter.version:
            request.prompt_hashes = b""  # they are another version's

    def _read_again(self, adapter: Adapter) -> bool:
        """False where all slots are in use."""
        slot = self._take_slot()
        if slot is None:
            return False
        self._slots[adapter] = slot
        self._unread.append(adapter)
        return True

    def _read_next(self) -> None:
        if self._reading is None and self._unread and self._store is not None:
            target = self._unread.popleft()
            self._reading = target, self._store.read(target.folder)

    def _finish_read(self) -> dict[str, str]:
        """Put what was read into its slot; returns the name of an adapter that cannot be read again, and why."""
        if self._reading is None or not self._reading[1].done():
            return {}
        (target, future), self._reading = self._reading, None
        if isinstance(target, LoadAdapter):
            try:
                self._register(target, future.result())
            except Exception as error:
                self._report(target, _sentence(error))
            else:
                self._report(target)
            return {}
        slot = self._slots.pop(target)
        if self._by_name.get(target.name) is not target:
            self._free.append(slot)
            return {}
        try:
            self._put(target, slot, _same_version(target, future.result()))
        except Exception as error:
            self._free.append(slot)
            return {target.name: f"the adapter {target.name} cannot be read again: {_sentence(error)}"}
        self._report(None)
        return {}

    def _register(self, message: LoadAdapter, weights: AdapterWeights) -> None:
        """A version that is loaded already keeps its slot. Raises AdapterError."""
        before = self._by_name.get(message.name)
        self._check_pins(message)
        if before is not None and before.version == weights.version:
            before.folder, before.pinned = message.folder, message.pinned
            adapter = before
        else:
            adapter = Adapter(message.name, message.folder, weights.version, message.pinned)
            self._by_name[message.name] = adapter
            if before is not None:
                self._retire(before)
        if adapter.slot is None and adapter not in self._slots and (slot := self._take_slot()) is not None:
            try:
                self._put(adapter, slot, weights)
            except Exception:
                self._free.append(slot)
                raise

    def _check_pins(self, message: LoadAdapter) -> None:
        """Raises AdapterError where adapters that are not pinned would have no slot."""
        others = [each for each in self._by_name.values() if each.name != message.name]
        num_pinned = sum(each.pinned for each in others) + message.pinned
        num_slots = 0 if self._store is None else self._store.num_slots
        if num_pinned > num_slots or (num_pinned == num_slots and num_pinned <= len(others)):
            raise AdapterError(
                f"the adapter {message.name} cannot be loaded: {num_pinned} pinned adapters leave no slot of "
                f"{num_slots} for the others: raise --max-loras or pin fewer"
            )

    def _put(self, adapter: Adapter, slot: int, weights: AdapterWeights) -> None:
        if self._store is not None:
            self._store.put(slot, weights)
        adapter.slot, adapter.last_used = slot, next(self._ticks)

    def _take_slot(self) -> int | None:
        """A free one, or that of the adapter which was unused for longest."""
        if self._free:
            return self._free.pop()
        idle = [
            each
            for each in self._by_name.values()
            if each.slot is not None and not each.num_requests and not each.pinned
        ]
        if not idle:
            return None
        oldest = min(idle, key=lambda each: each.last_used)
        slot, oldest.slot = oldest.slot, None
        return slot

    def _retire(self, adapter: Adapter) -> None:
        """Free the slot of an adapter that has lost its name, once no request computes with it."""
        if adapter.num_requests:
            self._draining.add(adapter)
        else:
            self._release(adapter)

    def _release(self, adapter: Adapter) -> None:
        if adapter.slot is not None:
            self._free.append(adapter.slot)
            adapter.slot = None

    def _report(
        self, answered: LoadAdapter | UnloadAdapter | None, error: str | None = None, status: int = 400
    ) -> None:
        """The answer to a message, or a change of state."""
        self._reports.append(
            AdapterReport(
                adapters=[each.info for each in self._by_name.values()],
                request_id=None if answered is None else answered.request_id,
                error=error,
                error_status=status,
            )
        )


def _same_version(adapter: Adapter, weights: AdapterWeights) -> AdapterWeights:
    if weights.version != adapter.version:
        raise AdapterError(f"{adapter.folder} has changed since it was loaded: load it again")
    return weights


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, AdapterError) else request_failure(error)
