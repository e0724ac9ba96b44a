"""A key's limits: requests and tokens in a minute, requests at a time, tokens in a month.

With Redis all gateways count together. Without it, or while it cannot be reached, each gateway counts for itself and
allows its share: the limit divided by the number of gateways.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from llmservice_gateway.access.counters import UNREACHABLE, Counters, LocalCounters, SharedCounters, Window, budget_key
from llmservice_gateway.access.keys import Key
from llmservice_gateway.openai_error import GatewayError

logger = logging.getLogger(__name__)

RENEWAL_S = 20.0
_RETRY_REDIS_S = 1.0  # after it could not be reached


class LimitError(GatewayError):
    """A limit is reached. `retry_after_s` is None where a repetition would be refused as well."""

    def __init__(self, reason: str, message: str, retry_after_s: int | None, headers: Mapping[str, str]) -> None:
        code = "insufficient_quota" if reason == "monthly_tokens" else "rate_limit_exceeded"
        # OpenAI's clients honour both.
        retry = {"x-should-retry": "false"} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        super().__init__(429, message, code, headers={**headers, **retry})
        self.reason = reason


@dataclass(slots=True, kw_only=True)
class Reservation:
    """What a request has been granted; `settle` it once, when it has ended."""

    headers: dict[str, str] = field(default_factory=dict)
    """x-ratelimit-*, as OpenAI has them."""
    _limiter: Limiter
    _counters: Counters
    _key: Key
    _tokens: int
    _budget: str | None
    _lease: str | None = None
    _spent: int = 0
    """Tokens that are counted against the budget."""
    _minute: int | None = None
    """In which the tokens are counted."""

    async def settle(self, used: int | None) -> None:
        """`used` tokens; None: unknown, then what was reserved counts. What Redis misses of a budget, it gets later."""
        limiter, shared, budget = self._limiter, self._limiter._shared, self._budget
        used = self._tokens if used is None else used
        if budget is not None and shared is not None:
            shared.owe(budget, used - self._spent)
        try:
            if self._lease is not None:
                await self._counters.release(self._key.name, self._lease)
            if self._minute is not None and used != self._tokens:
                await self._counters.correct(f"{self._key.name}/tokens", self._minute, used - self._tokens)
            if budget is not None and shared is not None and limiter.counts_together:
                await shared.post()
        except UNREACHABLE as error:
            limiter._lost(error)


class Limiter:
    """Decides whether a key's request is within its limits. `clock` returns seconds since 1970."""

    def __init__(
        self, shared: SharedCounters | None = None, replicas: int = 1, clock: Callable[[], float] = time.time
    ) -> None:
        self._shared = shared
        self._replicas = replicas
        self._clock = clock
        self._local = LocalCounters(clock)
        self._down_until_s: float | None = None  # Redis cannot be reached, and is tried again then

    @property
    def has_redis(self) -> bool:
        return self._shared is not None

    @property
    def counts_together(self) -> bool:
        """Whether Redis is there and can be reached."""
        return self._shared is not None and self._down_until_s is None

    def why_unusable(self, key: Key) -> str | None:
        """Why the key cannot be used with this gateway."""
        if key.policy.monthly_tokens is not None and self._shared is None:
            return "a monthly budget needs Redis: start the gateway with --redis-url, or remove monthlyTokens"
        return None

    async def admit(self, key: Key, tokens: int) -> Reservation:
        """Reserve `tokens`, those of the prompt and of the longest answer. Raises LimitError."""
        shared = self._shared
        if shared is not None and (self._down_until_s is None or self._clock() >= self._down_until_s):
            try:
                reservation = await self._reserve(shared, key, tokens, parts=1)
            except LimitError:
                self._found()
                raise
            except UNREACHABLE as error:
                self._lost(error)
            else:
                self._found()
                return reservation
        return await self._reserve(self._local, key, tokens, parts=self._replicas)

    async def renew(self) -> None:
        """Every RENEWAL_S; notices also between requests that Redis is lost, or back."""
        if self._shared is not None:
            try:
                await self._shared.renew()
            except UNREACHABLE as error:
                self._lost(error)
            else:
                self._found()

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()

    def _lost(self, error: Exception) -> None:
        if self._down_until_s is None:
            logger.warning(
                "Redis cannot be reached (%s): this gateway counts for itself, and allows 1/%d of each limit",
                type(error).__name__,
                self._replicas,
            )
        self._down_until_s = self._clock() + _RETRY_REDIS_S

    def _found(self) -> None:
        if self._down_until_s is not None:
            logger.info("Redis can be reached again: all gateways count together")
            self._down_until_s = None

    async def _reserve(self, counters: Counters, key: Key, tokens: int, parts: int) -> Reservation:
        now_s, policy = self._clock(), key.policy
        budget = None if policy.monthly_tokens is None else budget_key(key.name, now_s)
        reservation = Reservation(_limiter=self, _counters=counters, _key=key, _tokens=tokens, _budget=budget)
        try:
            reservation._lease = await _lease(counters, key, parts)
            if budget is not None and isinstance(counters, SharedCounters):
                reservation._spent = await _spend(counters, key, budget, tokens, now_s)
            if (limit := _share(policy.tokens_per_minute, parts)) is not None:
                window = await _hit(counters, "tokens", key, tokens, limit, parts)
                reservation._minute = window.minute
                reservation.headers |= _headers("tokens", limit, window)
            if (limit := _share(policy.requests_per_minute, parts)) is not None:
                window = await _hit(counters, "requests", key, 1, limit, parts)
                reservation.headers |= _headers("requests", limit, window)
        except BaseException as error:
            if not isinstance(error, UNREACHABLE):  # else the lease expires
                await reservation.settle(0)
            raise
        return reservation


async def _lease(counters: Counters, key: Key, parts: int) -> str | None:
    """Of one of the requests that the key may have at a time. Raises LimitError."""
    limit = _share(key.policy.concurrent_requests, parts)
    if limit is None:
        return None
    lease = uuid.uuid4().hex
    if not await counters.lease(key.name, limit, lease):
        message = f"The API key {key.name} may have {limit} requests at a time: wait for one to end."
        raise LimitError("concurrent_requests", message, 1, {})
    return lease


async def _spend(counters: SharedCounters, key: Key, budget: str, tokens: int, now_s: float) -> int:
    """Tokens that are now counted against the month's budget. Raises LimitError."""
    limit = key.policy.monthly_tokens
    if limit is None or await counters.spend(budget, tokens, limit):
        return tokens
    message = (
        f"The API key {key.name} may use {limit} tokens in a calendar month (UTC), and this request would exceed them: "
        "ask the key's owner for more, or wait for the next month."
    )
    raise LimitError("monthly_tokens", message, _until_next_month(now_s), {})


async def _hit(counters: Counters, what: str, key: Key, cost: int, limit: int, parts: int) -> Window:
    """Count in a minute. Raises LimitError."""
    allowed, window = await counters.hit(f"{key.name}/{what}", cost, limit)
    if not allowed:
        raise _refusal(what, key, window, cost, limit, parts)
    return window


def _share(limit: int | None, parts: int) -> int | None:
    """Of one of `parts` gateways; at least 1, so that a small limit lets in something everywhere."""
    return None if limit is None else max(1, limit // parts)


def _refusal(what: str, key: Key, window: Window, cost: int, limit: int, parts: int) -> LimitError:
    where = "" if parts == 1 else f" at this gateway, 1/{parts} of its limit"
    if cost > limit:
        message = (
            f"The request asks for {cost} tokens (prompt and max_tokens), and the API key {key.name} may use {limit} "
            f"in a minute{where}: lower max_tokens or shorten the prompt."
        )
        return LimitError("tokens", message, None, _headers(what, limit, window))
    wait_s = max(1, math.ceil(window.wait_s(cost, limit)))
    asks = f", this request asks for {cost}" if what == "tokens" else ""
    message = (
        f"The API key {key.name} may use {limit} {what} in a minute{where}: {window.used} are used{asks}. "
        f"Try again in {wait_s} s."
    )
    return LimitError(what, message, wait_s, _headers(what, limit, window))


def _headers(what: str, limit: int, window: Window) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, limit - window.used)),
        f"x-ratelimit-reset-{what}": f"{math.ceil(window.reset_s)}s",
    }


def _until_next_month(now_s: float) -> int:
    now = datetime.fromtimestamp(now_s, UTC)
    year, month = (now.year + 1, 1) if now.month == 12 else (now.year, now.month + 1)
    return math.ceil(datetime(year, month, 1, tzinfo=UTC).timestamp() - now_s)
