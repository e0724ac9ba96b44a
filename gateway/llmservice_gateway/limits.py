"""A key's limits: requests and tokens in a minute, requests at a time, tokens in a month.

With Redis all gateways count together. Without it, or while it cannot be reached, each gateway counts for itself and
allows its share: the limit divided by the number of gateways.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Protocol

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from llmservice_gateway.keys import Key

logger = logging.getLogger(__name__)

MINUTE_S = 60.0
LEASE_S = 60.0
"""A gateway that ends without releasing its requests blocks their key for so long."""
RENEWAL_S = 20.0
_REDIS_TIMEOUT_S = 1.0
_CONNECTION_WAIT_S = 5.0  # for one of the pool, in a burst
_MAX_CONNECTIONS = 64
_RETRY_REDIS_S = 1.0  # after it could not be reached
_BUDGET_KEPT_S = 40 * 24 * 3600
_UNREACHABLE = (RedisError, OSError, TimeoutError)

# Redis's clock alone decides when a lease ends and which minute it is.
_NOW_MS = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000); "
# A hash holds a name's counts by minute; it expires, so that a hit finds none that are older than those it deletes.
_HIT = (
    _NOW_MS
    + """
local minute = math.floor(now / 60000)
local left_ms = (minute + 1) * 60000 - now
local previous = tonumber(redis.call('HGET', KEYS[1], minute - 1) or '0')
local current = tonumber(redis.call('HGET', KEYS[1], minute) or '0')
local allowed = math.floor(previous * left_ms / 60000) + current + ARGV[1] <= tonumber(ARGV[2])
if allowed then
  current = redis.call('HINCRBY', KEYS[1], minute, ARGV[1])
  redis.call('HDEL', KEYS[1], minute - 2, minute - 3)
  redis.call('EXPIRE', KEYS[1], 120)
end
return {allowed and 1 or 0, minute, previous, current, left_ms}"""
)
_CORRECT = """
local count = redis.call('HGET', KEYS[1], ARGV[1])
if count then redis.call('HSET', KEYS[1], ARGV[1], math.max(0, count + ARGV[2])) end"""
_LEASE = (
    _NOW_MS
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1"""
)
_RENEW = (
    _NOW_MS
    + """
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return redis.call('ZADD', KEYS[1], 'XX', now + ARGV[1], ARGV[2])"""
)
_SPEND = """
local spent = tonumber(redis.call('GET', KEYS[1]) or '0')
if spent + ARGV[1] > tonumber(ARGV[2]) then return 0 end
redis.call('INCRBY', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1"""


class LimitError(Exception):
    """A limit is reached. `retry_after_s` is None where a repetition would be refused as well."""

    def __init__(self, reason: str, message: str, retry_after_s: int | None, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window of a minute, counted in two fixed ones: the earlier one weighs as much as of it is left."""

    minute: int
    """The current fixed window, in minutes since 1970."""
    previous: int
    current: int
    left_s: float
    """Until the next minute begins."""

    @property
    def used(self) -> int:
        return math.floor(self.previous * self.left_s / MINUTE_S) + self.current

    @property
    def reset_s(self) -> float:
        """Until nothing is counted any more."""
        return self.left_s + MINUTE_S if self.current else self.left_s if self.previous else 0.0

    def wait_s(self, cost: int, limit: int) -> float:
        """Until `cost` more, at most `limit`, are within the limit, if nothing else is counted meanwhile."""
        room = limit - cost
        if self.used <= room:
            return 0.0
        if self.current <= room:  # once enough of the earlier window has passed
            return self.left_s - MINUTE_S * (room - self.current) / self.previous
        return self.left_s + MINUTE_S * (1 - room / self.current)  # in the next window, this one is the earlier


class Counters(Protocol):
    """Where requests are counted."""

    async def hit(self, name: str, cost: int, limit: int) -> tuple[bool, Window]:
        """Count `cost` unless that exceeds the limit; returns whether it was counted, and the window with it."""
        ...

    async def correct(self, name: str, minute: int, difference: int) -> None:
        """Add to the count of this minute, or subtract down to 0, while it counts."""
        ...

    async def lease(self, name: str, limit: int, lease: str) -> bool: ...

    async def release(self, name: str, lease: str) -> None: ...


class LocalCounters:
    """Of this process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts = defaultdict[str, Counter[int]](Counter)  # of a name, by minute
        self._leases = Counter[str]()

    async def hit(self, name: str, cost: int, limit: int) -> tuple[bool, Window]:  # of the protocol
        now_s = self._clock()
        minute = int(now_s // MINUTE_S)
        counts = self._counts[name] = Counter({each: self._counts[name][each] for each in (minute - 1, minute)})
        window = Window(minute, counts[minute - 1], counts[minute], MINUTE_S - now_s % MINUTE_S)
        if window.used + cost > limit:
            return False, window
        counts[minute] += cost
        return True, replace(window, current=counts[minute])

    async def correct(self, name: str, minute: int, difference: int) -> None:
        counts = self._counts[name]
        counts[minute] = max(0, counts[minute] + difference)

    async def lease(self, name: str, limit: int, lease: str) -> bool:
        if self._leases[name] >= limit:
            return False
        self._leases[name] += 1
        return True

    async def release(self, name: str, lease: str) -> None:
        self._leases[name] -= 1
        if not self._leases[name]:
            del self._leases[name]


class SharedCounters:
    """Of all gateways, in Redis. Raises what `_UNREACHABLE` lists."""

    def __init__(self, url: str) -> None:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=_CONNECTION_WAIT_S,
            socket_timeout=_REDIS_TIMEOUT_S,
            socket_connect_timeout=_REDIS_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),  # a connection that Redis has closed, as by a restart
        )
        self._redis = Redis(connection_pool=pool)
        self._hit, self._correct = map(self._redis.register_script, (_HIT, _CORRECT))
        self._lease, self._renew, self._spend = map(self._redis.register_script, (_LEASE, _RENEW, _SPEND))
        self._held: dict[str, str] = {}  # leases of this gateway, and the names that they are of
        self._unposted = Counter[str]()  # tokens of budgets that are still to be written

    async def hit(self, name: str, cost: int, limit: int) -> tuple[bool, Window]:
        allowed, minute, previous, current, left_ms = await self._hit(keys=[_window_key(name)], args=[cost, limit])
        return bool(allowed), Window(minute, previous, current, left_ms / 1000)

    async def correct(self, name: str, minute: int, difference: int) -> None:
        await self._correct(keys=[_window_key(name)], args=[minute, difference])

    async def lease(self, name: str, limit: int, lease: str) -> bool:
        if not await self._lease(keys=[_lease_key(name)], args=[limit, int(LEASE_S * 1000), lease]):
            return False
        self._held[lease] = name
        return True

    async def release(self, name: str, lease: str) -> None:
        self._held.pop(lease, None)
        await self._redis.zrem(_lease_key(name), lease)

    async def renew(self) -> None:
        """Keep the leases of requests that take long. Reaches Redis also where there are none."""
        await self._redis.ping()
        for lease, name in list(self._held.items()):
            await self._renew(keys=[_lease_key(name)], args=[int(LEASE_S * 1000), lease])

    async def spend(self, budget: str, tokens: int, limit: int) -> bool:
        """Count tokens against a budget, unless they exceed it."""
        await self.post()
        return bool(await self._spend(keys=[budget], args=[tokens, limit, _BUDGET_KEPT_S]))

    def owe(self, budget: str, tokens: int) -> None:
        """Count tokens against a budget, or fewer, whatever its limit, with the next `post`."""
        self._unposted[budget] += tokens

    async def post(self) -> None:
        """Write what is owed; what cannot be written now is still owed."""
        while self._unposted:
            budget, tokens = self._unposted.popitem()
            if not tokens:
                continue
            try:
                await self._redis.incrby(budget, tokens)
                await self._redis.expire(budget, _BUDGET_KEPT_S)
            except BaseException:
                self._unposted[budget] += tokens
                raise

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()


def _window_key(name: str) -> str:
    return f"llmservice:minutes:{name}"


def _lease_key(name: str) -> str:
    return f"llmservice:requests:{name}"


def budget_key(name: str, now_s: float) -> str:
    return f"llmservice:tokens:{name}:{datetime.fromtimestamp(now_s, UTC):%Y-%m}"


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
        """`used` tokens; None: unknown, then what was reserved counts."""
        await self._limiter.settle(self, used)


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
            except _UNREACHABLE as error:
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
            except _UNREACHABLE as error:
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
            if not isinstance(error, _UNREACHABLE):  # else the lease expires
                await self.settle(reservation, 0)
            raise
        return reservation

    async def settle(self, reservation: Reservation, used: int | None) -> None:
        """A reservation's request has ended. What Redis does not hear of a budget now, it does later."""
        counters, key, budget = reservation._counters, reservation._key, reservation._budget
        used = reservation._tokens if used is None else used
        if budget is not None and self._shared is not None:
            self._shared.owe(budget, used - reservation._spent)
        try:
            if reservation._lease is not None:
                await counters.release(key.name, reservation._lease)
            if reservation._minute is not None and used != reservation._tokens:
                await counters.correct(f"{key.name}/tokens", reservation._minute, used - reservation._tokens)
            if budget is not None and self._shared is not None and self.counts_together:
                await self._shared.post()
        except _UNREACHABLE as error:
            self._lost(error)


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


def shared_counters(url: str) -> SharedCounters:
    """Raises ValueError where it is no URL of Redis."""
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("expected redis://HOST:PORT/DB, or rediss:// with TLS")
    return SharedCounters(url)
