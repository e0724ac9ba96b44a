"""How a prompt is completed offline: the engine's parameters, and those that only the side with the text can apply."""

from __future__ import annotations

from llmservice_server import messages


class SamplingParams(messages.SamplingParams, frozen=True, kw_only=True):
    """The same names and meanings as in the HTTP API; what the engine takes is inherited.

    `stop`: texts that end the answer and are not part of it. `n`: answers a prompt. The tokens that end a sequence are
    added to `stop_token_ids` unless `ignore_eos`. Raises ValueError for what means nothing.
    """

    max_tokens: int = 16
    n: int = 1
    stop: str | tuple[str, ...] | list[str] = ()

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}, expected at least 1")
        if not all(self.stop_strings):
            raise ValueError("stop holds an empty text, which would match at once: leave it out")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def for_engine(self, choice: int, eos_token_ids: frozenset[int]) -> messages.SamplingParams:
        """What the engine is told for answer number `choice`: seeds differ, so that the answers do."""
        fields = {name: getattr(self, name) for name in messages.SamplingParams.__struct_fields__}
        eos = frozenset[int]() if self.ignore_eos else eos_token_ids
        fields["stop_token_ids"] = tuple(sorted(eos.union(self.stop_token_ids)))
        if self.seed is not None:
            fields["seed"] = (self.seed + choice) % 2**63
        return messages.SamplingParams(**fields)
