"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets through the text that can no longer be part of a stop string, and ends at the first one that appears."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """`keep`: the stop string that appears is let through as well."""
        self._keep = keep
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        self.rest = ""  # what stood behind the match

    def append(self, text: str) -> str:
        """The text that is safe to show; after a match nothing more is."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            index, self.matched = min(found)
            self._held = ""
            self.rest = text[index + len(self.matched) :]
            return text[: index + len(self.matched)] if self._keep else text[:index]
        safe = len(text) - self._longest_tail(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What was held back, once the sequence has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _longest_tail(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
