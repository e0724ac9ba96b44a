"""Counts of requests and tokens by name: in Redis, where all gateways count together, or in this process."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

MINUTE_S = 60.0
LEASE_S = 60.0
"""A gateway that ends without releasing its requests blocks their key for so long."""
UNREACHABLE = (RedisError, OSError, TimeoutError)
_REDIS_TIMEOUT_S = 1.0
_CONNECTION_WAIT_S = 5.0  # for one of the pool, in a burst
_MAX_CONNECTIONS = 64
_BUDGET_KEPT_S = 40 * 24 * 3600

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
    """Of all gateways, in Redis. Raises what `UNREACHABLE` lists, and ValueError where `url` is none of Redis."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("expected redis://HOST:PORT/DB, or rediss:// with TLS")
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
