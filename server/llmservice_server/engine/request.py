"""One request inside the engine: its tokens, how far they are computed, and where its keys and values live."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmservice_server.engine.block_pool import BlockHashes
from llmservice_server.types.messages import FinishReason, GenerateRequest, SamplingParams, TokenLogprobs


class Grammar(Protocol):
    """Where in its grammar one answer stands."""

    @property
    def problem(self) -> str | None:
        """Why this answer cannot be continued, in one line for the client; None: it can."""

    def take(self, token_id: int) -> bool:
        """Move on by a token that the grammar allowed; True where the sentence is complete."""


class TokenHistory:
    """Ids in one buffer, so that a step gathers them without touching each: the prompt's once each, then the answer's.

    ```
    ids   | distinct tokens of the prompt | tokens of the answer ... |   room   |
    ```
    """

    def __init__(self, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        prompt = np.unique(np.array(prompt_token_ids, dtype=np.int64))
        self._num_prompt = len(prompt)
        self._num_ids = len(prompt)
        self._ids = np.empty(len(prompt) + max_tokens, dtype=np.int64)
        self._ids[: len(prompt)] = prompt

    def append(self, token_id: int) -> None:
        """Count a token of the answer; there may be `max_tokens` of them."""
        self._ids[self._num_ids] = token_id
        self._num_ids += 1

    @property
    def everything(self) -> npt.NDArray[np.int64]:
        """Prompt and answer; a token may stand here more than once."""
        return self._ids[: self._num_ids]

    @property
    def answer(self) -> npt.NDArray[np.int64]:
        """A token stands here as often as it was generated."""
        return self._ids[self._num_prompt : self._num_ids]


LANES = ("interactive", "batch")  # in the order in which they are served


def new_block_table(blocks: Iterable[int] = ()) -> array[int]:
    """32-bit numbers side by side, as the kernels read them: a step copies tables as bytes, not block by block."""
    return array("i", blocks)


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A sequence that chases `num_tokens` with `num_computed_tokens`.

        token_ids   | prompt ................ | output ......... |
        computed    | keys and values in the cache ...... |        <- num_computed_tokens
                                                          | to do |

    A token is sampled by the step that computes the last known one. Preemption sets `num_computed_tokens` back to 0 and
    keeps `token_ids`, so what was generated is computed again as if it were prompt.
    Where it is swapped out instead, `num_computed_tokens` stays and `swapped_blocks` hold the keys and values.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    seed: int
    lane: str
    priority: tuple[int, int, int]  # (lane's rank, client's priority, arrival): the smallest is served first
    arrival_s: float
    deadline_s: float | None = None
    queue_deadline_s: float | None = None
    cache_salt: str | None = None
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    block_table: array[int] = field(default_factory=new_block_table)  # token `i`: `block_table[i // block_size]`
    first_scheduled_s: float | None = None
    history: TokenHistory | None = None  # what the penalties count; None: there are none
    grammar: Grammar | None = None
    is_plain: bool = True  # its logits are sampled as they are, and no log-probabilities are returned
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    place: tuple[int, float, int] = (0, 0.0, 0)  # in its lane's queue
    allowed_token_ids: npt.NDArray[np.int64] | None = None  # None: all
    block_hashes: BlockHashes | None = None  # None: nothing of it is found in, or left to, the prefix cache
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when the request was first admitted
    num_committed_blocks: int = 0  # the first ones of the table, which are registered in the prefix cache
    swapped_blocks: list[int] = field(default_factory=list)  # in the swap space, in token order

    @classmethod
    def of(cls, message: GenerateRequest, order: int, seed: int, eos_token_ids: frozenset[int]) -> Request:
        """`order` counts arrivals; `seed` is used if the message has none; `ignore_eos` lets `eos_token_ids` pass."""
        sampling = message.sampling
        stop = frozenset(sampling.stop_token_ids)
        rank = LANES.index(message.lane) if message.lane in LANES else len(LANES)
        return cls(
            request_id=message.request_id,
            token_ids=list(message.prompt_token_ids),
            num_prompt_tokens=len(message.prompt_token_ids),
            sampling=sampling,
            stop_token_ids=stop - eos_token_ids if sampling.ignore_eos else stop,
            seed=seed if sampling.seed is None else sampling.seed,
            lane=message.lane,
            priority=(rank, message.priority, order),
            allowed_token_ids=np.array(sampling.allowed_token_ids, np.int64) if sampling.allowed_token_ids else None,
            arrival_s=message.arrival_s,
            deadline_s=message.deadline_s,
            is_plain=sampling.is_plain,
            history=TokenHistory(message.prompt_token_ids, sampling.max_tokens) if sampling.has_penalties else None,
            queue_deadline_s=message.queue_deadline_s,
            cache_salt=message.cache_salt,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token; returns why the request is finished, or None. A stop token is not kept."""
        if token_id in self.stop_token_ids:
            return "stop"
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.append(token_id)
        if self.grammar is not None and self.grammar.take(token_id):
            return "stop"
        return "length" if len(self.token_ids) - self.num_prompt_tokens >= self.sampling.max_tokens else None
