"""Children that the API server refused: asked for again ever more seldom, and at once where something changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from llmservice_operator.api import labels
from llmservice_operator.api.kinds import ChildKey
from llmservice_operator.api.spec import Manifest
from llmservice_operator.apply.drift import digest
from llmservice_operator.children.child import Child
from llmservice_operator.cluster.object_cache import version
from llmservice_operator.pods.pod import Trouble

_FIRST_WAIT_S, _LONGEST_WAIT_S = 5.0, 300.0

Case = tuple[int, bool, str, int]
"""The service's generation, whether the child is wanted, the digest of what it should be, the version of what is there.
Another case has not been refused."""


@dataclass(frozen=True, slots=True)
class _Refused:
    case: Case
    service: str
    trouble: Trouble
    wait_s: float
    until_s: float


class Refusals:
    """What was refused lately, by child. Times are this process's own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[ChildKey, _Refused] = {}

    def __len__(self) -> int:
        return len(self._known)

    def standing(self, child: Child, live: Manifest | None, generation: int) -> Trouble | None:
        """The refusal that need not be asked for again yet; None where it is time, or where there is none."""
        known = self._known.get(child.key)
        if known is None or self._clock() >= known.until_s:
            return None
        return known.trouble if known.case == _case(child, live, generation) else None

    def add(self, child: Child, live: Manifest | None, generation: int, trouble: Trouble) -> None:
        """`live` is what the cache had when the request was sent."""
        case = _case(child, live, generation)
        known = self._known.get(child.key)
        again = known is not None and known.case == case
        wait_s = min(known.wait_s * 2, _LONGEST_WAIT_S) if known is not None and again else _FIRST_WAIT_S
        service = child.manifest["metadata"]["labels"][labels.INSTANCE]
        self._known[child.key] = _Refused(case, service, trouble, wait_s, self._clock() + wait_s)

    def settle(self, key: ChildKey) -> None:
        """The child was made what it should be."""
        self._known.pop(key, None)

    def forget(self, namespace: str, service: str) -> None:
        for key in [key for key, one in self._known.items() if (key[1], one.service) == (namespace, service)]:
            del self._known[key]


def _case(child: Child, live: Manifest | None, generation: int) -> Case:
    return generation, child.wanted, digest(child.manifest), version(live["metadata"]) if live is not None else -1
