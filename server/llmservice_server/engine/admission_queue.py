"""The admission queue of each lane: what waits for the engine, as the HTTP process counts it, and what is refused.

A queue refuses requests from 80 % of its bound on, with the seconds after which to try again: a client that is refused
at once can use another replica. The rest is for clients, as API keys name them, that use less than an equal share of
the queue: so one client that fills it does not keep the others out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_WINDOW_S = 10.0  # what is older than a few of these has no weight


class DrainRate:
    """Amount per second, as an exponentially weighted mean."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._weighted = 0.0
        self._last_s = started_s

    def add(self, amount: float, now: float) -> None:
        self._weighted = self._faded(now) + amount
        self._last_s = now

    def per_s(self, now: float) -> float:
        age_s = now - self._started_s
        seen_s = _WINDOW_S * -math.expm1(-age_s / _WINDOW_S)  # a young rate has seen less than a window
        return self._faded(now) / seen_s if seen_s > 0 else 0.0

    def _faded(self, now: float) -> float:
        return self._weighted * math.exp(-(now - self._last_s) / _WINDOW_S)


_REFUSED_FROM = 0.8
_MAX_RETRY_S = 60


def limit_of(bound: int, own: int, num_clients: int) -> int:
    """What may wait in all for a client that would have `own` of it: the last fifth is for less than an equal share."""
    return bound if num_clients > 1 and own * num_clients <= bound else math.ceil(_REFUSED_FROM * bound)


@dataclass(frozen=True, slots=True)
class QueueBound:
    """What may wait in one lane. A request that finds its lane empty is admitted, however many tokens it has."""

    max_requests: int
    max_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """One sentence for the client, and when to try again."""

    message: str
    retry_after_s: int


@dataclass(frozen=True, slots=True)
class _Entry:
    lane: str
    num_tokens: int
    work: float  # tokens of the prompt, and those predicted of the answer
    client: str | None


@dataclass(slots=True)
class _Waiting:
    """Of one client in one lane."""

    requests: int = 0
    tokens: int = 0


class AdmissionQueue:
    """Sequences between being sent to the engine and their end. All times are monotonic seconds."""

    def __init__(self, bounds: Mapping[str, QueueBound], now: float) -> None:
        self._bounds = bounds
        self._in_flight: dict[str, _Entry] = {}
        self._waiting: dict[str, _Entry] = {}  # those of them that have no token yet
        self._num_waiting = Counter[str]()
        self._waiting_tokens = Counter[str]()
        self._waiting_work = dict.fromkeys(bounds, 0.0)
        self._clients: dict[str, dict[str | None, _Waiting]] = {lane: {} for lane in bounds}
        self._work_drained = {lane: DrainRate(now) for lane in bounds}

    def enter(
        self, request_id: str, lane: str, num_tokens: int, client: str | None = None, predicted_tokens: float = 0.0
    ) -> None:
        """`num_tokens`: of the prompt; `predicted_tokens`: of the answer."""
        entry = _Entry(lane, num_tokens, num_tokens + predicted_tokens, client)
        self._in_flight[request_id] = self._waiting[request_id] = entry
        self._num_waiting[lane] += 1
        self._waiting_tokens[lane] += num_tokens
        self._waiting_work[lane] += entry.work
        own = self._clients[lane].setdefault(client, _Waiting())
        own.requests += 1
        own.tokens += num_tokens

    def start(self, request_id: str, now: float) -> None:
        """The engine has computed the prompt."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._num_waiting[entry.lane] -= 1
            self._waiting_tokens[entry.lane] -= entry.num_tokens
            self._waiting_work[entry.lane] -= entry.work
            self._forget(entry)
            self._work_drained[entry.lane].add(entry.work, now)

    def leave(self, request_ids: Iterable[str], now: float) -> None:
        """Sequences have ended, whether or not they ever started."""
        for request_id in request_ids:
            self.start(request_id, now)
            self._in_flight.pop(request_id, None)

    def _forget(self, entry: _Entry) -> None:
        clients = self._clients[entry.lane]
        own = clients[entry.client]
        own.requests -= 1
        own.tokens -= entry.num_tokens
        if not own.requests:
            del clients[entry.client]

    def _refused_from(self, lane: str, client: str | None, num_tokens: list[int]) -> tuple[int, int]:
        """Sequences and tokens that may wait in all for this client to be let in: more where it has less than others.

        Its share is an equal one among those that wait, itself included.
        """
        bound, clients = self._bounds[lane], self._clients[lane]
        own = clients.get(client, _Waiting())
        num_clients = len(clients) + (client not in clients)
        return (
            limit_of(bound.max_requests, own.requests + len(num_tokens), num_clients),
            limit_of(bound.max_prompt_tokens, own.tokens + sum(num_tokens), num_clients),
        )

    def why_refused(
        self,
        lane: str,
        num_tokens: list[int],
        *,
        predicted_tokens: float = 0.0,
        client: str | None = None,
        max_num_seqs: int,
        engine_lets_wait: bool,
        now: float,
    ) -> Refusal | None:
        """Whether sequences with prompts of `num_tokens`, and answers of `predicted_tokens` in all, would be too many.

        When to try again follows from the work that waits, the predicted answers included, and how fast it drains.

        Where no request waits in the engine, what it can run beside those in flight needs no queue.
        `engine_lets_wait` is a step old, what is counted here is exact: so no burst between two steps passes the bound.
        """
        bound = self._bounds[lane]
        waiting = self._num_waiting[lane] + len(num_tokens)
        if not engine_lets_wait:
            waiting = max(0, min(waiting, len(self._in_flight) + len(num_tokens) - max_num_seqs))
        limit, token_limit = self._refused_from(lane, client, num_tokens)
        work = self._waiting_work[lane] + sum(num_tokens) + predicted_tokens
        drained_per_s = self._work_drained[lane].per_s(now)
        if waiting > limit:
            return Refusal(
                f"the {lane} queue is full: {self._num_waiting[lane]} sequences are waiting, {len(num_tokens)} more "
                f"are refused from {limit} on, of at most {bound.max_requests}",
                _seconds(work * (waiting - limit) / (self._num_waiting[lane] + len(num_tokens)), drained_per_s),
            )
        tokens = self._waiting_tokens[lane] + sum(num_tokens)
        if waiting and self._num_waiting[lane] and tokens > token_limit:
            return Refusal(
                f"the {lane} queue is full: {self._waiting_tokens[lane]} prompt tokens are waiting, {sum(num_tokens)} "
                f"more are refused from {token_limit} on, of at most {bound.max_prompt_tokens}",
                _seconds(work * (tokens - token_limit) / tokens, drained_per_s),
            )
        return None


def _seconds(work: float, drained_per_s: float) -> int:
    """Until so much has drained, in whole seconds from 1 on; at most a minute."""
    return _MAX_RETRY_S if work >= _MAX_RETRY_S * drained_per_s else max(1, math.ceil(work / drained_per_s))
