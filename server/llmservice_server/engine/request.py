"""A request inside the engine: why it is refused, its tokens and blocks."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llmservice_planner.traffic.output_lengths import length_class
from llmservice_server.engine.adapters import Adapter
from llmservice_server.engine.block_pool import BlockHashes
from llmservice_server.engine.config import LANES
from llmservice_server.types.messages import FinishReason, GenerateRequest, SamplingParams, TokenLogprobs

MAX_LOGPROBS = 20  # top tokens returned with each token, as at OpenAI


class Grammar(Protocol):
    """The state of one answer in its grammar."""

    @property
    def problem(self) -> str | None:
        """Why this answer cannot be continued, in one line for the client; None: it can."""

    def take(self, token_id: int) -> bool:
        """Move on by a token that the grammar allowed; True where the answer is complete."""


class TokenHistory:
    """The distinct tokens of a request, those of its prompt first, and how often each was generated."""

    def __init__(self, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        prompt = np.unique(np.array(prompt_token_ids, dtype=np.int64))
        self._num_prompt = self.num_places = len(prompt)
        self.most_places = len(prompt) + max_tokens
        self.ids = np.empty(self.most_places, np.int64)
        self.ids[: len(prompt)] = prompt
        self.counts = np.zeros(self.most_places, np.int64)
        self.changed: Sequence[int] = []  # places, since this was last emptied
        self._places: dict[int, int] = {}  # of the tokens that were generated

    def append(self, token_id: int) -> None:
        """Count a token of the answer; there may be `max_tokens` of them."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._new_place(token_id)
        self.counts[place] += 1
        self.changed = [*self.changed, place]

    def _new_place(self, token_id: int) -> int:
        place = int(np.searchsorted(self.ids[: self._num_prompt], token_id))
        if place < self._num_prompt and self.ids[place] == token_id:
            return place
        self.ids[self.num_places] = token_id
        self.num_places += 1
        return self.num_places - 1


def new_block_table(blocks: Iterable[int] = ()) -> array[int]:
    """32-bit numbers side by side, as the kernels read them: a step copies tables as bytes, not block by block."""
    return array("i", blocks)


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A sequence of tokens, of which the first `num_computed_tokens` have keys and values in the cache.

        token_ids   | prompt ................ | output ......... |
        computed    | keys and values in the cache ...... |        <- num_computed_tokens
                                                          | to do |

    The step that computes the last known token samples the next one. Preemption resets `num_computed_tokens` to 0 and
    keeps `token_ids`, so generated tokens are computed again like a prompt. Where the request is swapped out instead,
    `num_computed_tokens` stays and the `swapped` blocks hold the keys and values.
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
    client: str | None = None  # who shares its lane equally with others
    length_class: int = 0  # of the prompt, in quarter-octaves
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    block_table: array[int] = field(default_factory=new_block_table)
    """Token `i` is in `block_table[i // block_size]`. It grows; whatever else changes it makes another array of it, as
    devices keep copies. But blocks that no window reaches any more become null blocks, as no kernel reads them."""
    more_tables: tuple[array[int], ...] = ()  # of the other groups of layers, all as long
    num_slid: list[int] = field(default_factory=list)  # of each group: its table's first blocks that are null blocks
    first_scheduled_s: float | None = None
    history: TokenHistory | None = None  # what the penalties count; None: there are none
    grammar: Grammar | None = None
    is_plain: bool = True  # its logits are sampled as they are, and no log-probabilities are returned
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    predicted_tokens: float = 0.0  # of the answer
    work: float = 0.0  # in tokens, by which its lane orders it
    place: tuple[int, float, int] = (0, 0.0, 0)  # in its lane's queue
    allowed_token_ids: npt.NDArray[np.int64] | None = None  # None: all
    block_hashes: BlockHashes | None = None  # None: nothing of it is found in, or left to, the prefix cache
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when the request was first admitted
    num_committed_blocks: int = 0  # the first ones of the table, which are registered in the prefix cache
    num_shared_blocks: int = 0  # the first ones of the table, which were computed for other requests
    hits: list[list[int]] = field(default_factory=list)  # of each group, found when it was last considered
    prompt_hashes: bytes = b""  # of `hash_blocks`; empty: not computed yet
    adapter_name: str | None = None
    adapter_version: str = ""  # the one that `prompt_hashes` are of
    adapter: Adapter | None = None  # that it computes with, from its entry into a queue of the scheduler to its end
    swapped: list[dict[int, int]] = field(default_factory=list)  # of each group: blocks in the swap space, by place

    @classmethod
    def of(cls, message: GenerateRequest, order: int, seed: int, eos_token_ids: frozenset[int]) -> Request:
        """`order` counts arrivals; `seed` is used if the message has none; `ignore_eos` lets `eos_token_ids` pass."""
        sampling = message.sampling
        stop = frozenset(sampling.stop_token_ids)
        return cls(
            request_id=message.request_id,
            token_ids=list(message.prompt_token_ids),
            num_prompt_tokens=len(message.prompt_token_ids),
            sampling=sampling,
            stop_token_ids=stop - eos_token_ids if sampling.ignore_eos else stop,
            seed=seed if sampling.seed is None else sampling.seed,
            lane=message.lane,
            priority=(LANES.index(message.lane), message.priority, order),
            allowed_token_ids=np.array(sampling.allowed_token_ids, np.int64) if sampling.allowed_token_ids else None,
            arrival_s=message.arrival_s,
            length_class=length_class(len(message.prompt_token_ids)),
            deadline_s=message.deadline_s,
            is_plain=sampling.is_plain,
            history=TokenHistory(message.prompt_token_ids, sampling.max_tokens) if sampling.has_penalties else None,
            queue_deadline_s=message.queue_deadline_s,
            cache_salt=message.cache_salt,
            client=message.client,
            predicted_tokens=sampling.max_tokens if message.predicted_tokens is None else message.predicted_tokens,
            prompt_hashes=message.block_hashes,
            adapter_name=message.adapter,
            adapter_version=message.adapter_version,
        )

    @property
    def block_tables(self) -> tuple[array[int], ...]:
        """Of each group of layers."""
        return self.block_table, *self.more_tables

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_shared(self) -> int:
        """The blocks of other requests that it holds, or would if it were admitted as it was last considered."""
        return sum([max(0, self.num_shared_blocks - slid) for slid in self.num_slid])

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


def why_refused(message: GenerateRequest, vocab_size: int, max_request_tokens: int) -> str | None:
    """The error message for the client, or None. The HTTP process checks as well; the engine does not rely on it."""
    prompt, sampling = message.prompt_token_ids, message.sampling
    if not prompt:
        return "the prompt has no tokens, expected at least one"
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return f"the prompt holds a token id outside the model's vocabulary, expected 0 to {vocab_size - 1}"
    if message.lane not in LANES:
        return f"lane is {message.lane!r}, expected one of {', '.join(LANES)}"
    total = len(prompt) + sampling.max_tokens
    if total > max_request_tokens:
        return (
            f"{len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} make {total}, expected at most "
            f"{max_request_tokens}: shorten the prompt or lower max_tokens"
        )
    if any(not 0 <= token < vocab_size for token in sampling.logit_bias):
        return f"logit_bias names a token id outside the model's vocabulary, expected 0 to {vocab_size - 1}"
    return _why_unmaskable(sampling, vocab_size) or _why_unsampleable(sampling)


def _why_unmaskable(sampling: SamplingParams, vocab_size: int) -> str | None:
    masked = itertools.chain(sampling.allowed_token_ids, *sampling.bad_words)
    if any(not 0 <= token < vocab_size for token in masked) or not all(sampling.bad_words):
        return f"allowed_token_ids or bad_words hold no id of the model's vocabulary, expected 0 to {vocab_size - 1}"
    if sampling.grammar is not None and (sampling.allowed_token_ids or sampling.bad_words):
        return "allowed_token_ids and bad_words cannot be combined with a grammar: leave one out"
    allowed = {*sampling.allowed_token_ids}
    if sampling.min_tokens and allowed and allowed.issubset(sampling.stop_token_ids):
        return "allowed_token_ids holds only tokens that min_tokens forbids"
    return None


def _why_unsampleable(sampling: SamplingParams) -> str | None:
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}, expected at least 1"
    if not 0 <= sampling.temperature < float("inf"):
        return f"temperature is {sampling.temperature}, expected a number from 0 on"
    if not 0 <= sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}, expected 0 to 1"
    if sampling.top_k < 0:
        return f"top_k is {sampling.top_k}, expected 0 (off) or more"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}, expected 0 to 1"
    return _why_unadjustable(sampling)


def _why_unadjustable(sampling: SamplingParams) -> str | None:
    for name, value in (("presence", sampling.presence_penalty), ("frequency", sampling.frequency_penalty)):
        if not -2 <= value <= 2:
            return f"{name}_penalty is {value}, expected -2 to 2"
    if not 0.01 <= sampling.repetition_penalty <= 10:  # beyond, logits overflow
        return f"repetition_penalty is {sampling.repetition_penalty}, expected 0.01 to 10"
    if not all(-100 <= bias <= 100 for bias in sampling.logit_bias.values()):
        return "logit_bias adds more or less than 100 to a logit, expected -100 to 100"
    if sampling.min_tokens < 0 or (sampling.min_tokens > 0 and sampling.grammar is not None):
        return f"min_tokens is {sampling.min_tokens}, expected 0 or more, and 0 beside a grammar, which decides itself"
    if any(
        count is not None and not 0 <= count <= MAX_LOGPROBS for count in (sampling.logprobs, sampling.prompt_logprobs)
    ):
        return f"logprobs and prompt_logprobs count likely tokens, expected 0 to {MAX_LOGPROBS}"
    return None
