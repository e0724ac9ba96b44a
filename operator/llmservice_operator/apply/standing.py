"""Services whose children stand as they should: while nothing moves, nothing is made up and compared again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmservice_operator.api.kinds import ChildKey
from llmservice_operator.children.child import Child
from llmservice_operator.cluster.object_cache import ObjectCache, version
from llmservice_operator.sizing.sizing import Sized

_LACKING = -1


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that the children of a service are made from."""

    uid: str
    generation: int
    sized: Sized
    replicas: int


@dataclass(frozen=True, slots=True)
class _Stood:
    inputs: Inputs
    states: tuple[tuple[ChildKey, int | None], ...]
    """The version of each child in the cache; None: it is not there, and is not to be."""


class Standing:
    """Remembers by service. A thousand of them that need nothing must cost next to nothing."""

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache
        self._stood: dict[tuple[str, str], _Stood] = {}

    def __len__(self) -> int:
        return len(self._stood)

    def holds(self, service: tuple[str, str], inputs: Inputs) -> bool:
        """Whether the children were seen as they should be by these inputs, and none has moved since."""
        stood = self._stood.get(service)
        if stood is None or stood.inputs != inputs:
            return False
        return all(self._state(key) == state for key, state in stood.states)

    def note(self, service: tuple[str, str], inputs: Inputs, children: Sequence[Child]) -> None:
        """The children were just applied, and none was refused. What no watch would tell of is looked at every time."""
        self._stood.pop(service, None)
        if any(not self._cache.follows(child.kind.name) for child in children):
            return
        states = tuple((child.key, self._state(child.key)) for child in children)
        pairs = zip(children, states, strict=True)
        if all(state == _LACKING or child.wanted == (state is not None) for child, (_, state) in pairs):
            self._stood[service] = _Stood(inputs, states)

    def forget(self, service: tuple[str, str]) -> None:
        self._stood.pop(service, None)

    def _state(self, key: ChildKey) -> int | None:
        """A kind that the cluster lacks has no objects: its children are neither there nor missing."""
        if self._cache.lacks(key[0]):
            return _LACKING
        live = self._cache.child(*key)
        return None if live is None else version(live["metadata"])
