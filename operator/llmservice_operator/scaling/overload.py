"""How long an overload lasts until a new pod serves: the time that users wait for the autoscaler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OverloadTimer:
    """Of one service. An overload begins when the load asks for more replicas than serve."""

    _since_s: float | None = None
    _serving: int = 0

    def observe(self, wanted: int, serving: int, now_s: float) -> float | None:
        """Seconds from the beginning of the overload, in the pass that first sees one more pod serve."""
        if self._since_s is None:
            if wanted > serving > 0:  # a service that starts from zero has no overload, it has no pod
                self._since_s, self._serving = now_s, serving
            return None
        lasted_s = now_s - self._since_s
        if serving > self._serving:
            self._since_s = now_s if wanted > serving else None
            self._serving = serving
            return lasted_s
        if wanted <= serving:  # it went by itself
            self._since_s = None
        self._serving = min(self._serving, serving)
        return None
