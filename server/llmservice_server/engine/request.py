"""One request inside the engine: its tokens, how far they are computed, and where its keys and values live."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from llmservice_server.engine.block_hash import BlockHashes
from llmservice_server.messages import FinishReason, Generate, SamplingParams, TokenLogprobs
from llmservice_server.sampling.grammar import Grammar
from llmservice_server.sampling.token_history import TokenHistory

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
    priority: tuple[int, int]  # (lane's rank, order of arrival): the smaller is served first and preempted last
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
    is_plain: bool = True  # its logits are sampled as they are, and nothing is told of them
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    place: tuple[float, int] = (0.0, 0)  # in its lane's queue
    block_hashes: BlockHashes | None = None  # None: nothing of it is found in, or left to, the prefix cache
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when the request was first admitted
    num_committed_blocks: int = 0  # the first ones of the table, which the prefix cache has been told of
    swapped_blocks: list[int] = field(default_factory=list)  # in the swap space, in token order

    @classmethod
    def of(cls, message: Generate, order: int, seed: int, eos_token_ids: frozenset[int]) -> Request:
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
            priority=(rank, order),
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
