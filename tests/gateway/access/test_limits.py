"""Limits of a key: what is counted, what is given back, and how gateways count together in a real Redis."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from llmservice_gateway.access.admission import Access
from llmservice_gateway.access.counters import MINUTE_S, Counters, LocalCounters, SharedCounters, Window, budget_key
from llmservice_gateway.access.keys import Key, Policy
from llmservice_gateway.access.limits import Limiter, LimitError, Reservation
from llmservice_gateway.metrics import GatewayMetrics

NOVEMBER_S = 1_795_521_600.0  # 2026-11-24 12:00 UTC
DECEMBER_S = NOVEMBER_S + 7 * 24 * 3600


def key(**limits: Any) -> Key:
    return Key("alice", Policy(**limits))


async def outcome(limiter: Limiter, of: Key, tokens: int = 1) -> Reservation | LimitError:
    try:
        return await limiter.admit(of, tokens)
    except LimitError as error:
        return error


async def admitted(limiter: Limiter, of: Key, tokens: int = 1) -> bool:
    return isinstance(await outcome(limiter, of, tokens), Reservation)


@pytest.mark.parametrize(
    ("window", "cost", "limit", "used", "wait_s"),
    [
        (Window(7, 0, 0, 60), 1, 10, 0, 0),
        (Window(7, 0, 9, 40), 1, 10, 9, 0),
        (Window(7, 0, 10, 40), 1, 10, 10, 40 + 6),  # the next window begins in 40 s, and a tenth of it must pass
        (Window(7, 0, 10, 60), 10, 10, 10, 60 + 60),
        (Window(7, 10, 5, 30), 1, 10, 10, 30 - 24),  # 4 of 10 are left of the earlier window after 6 s
        (Window(7, 10, 0, 60), 10, 10, 10, 60),
        (Window(7, 10, 0, 30), 5, 10, 5, 0),
    ],
)
def test_a_window_tells_what_is_used_and_how_long_to_wait(
    window: Window, cost: int, limit: int, used: int, wait_s: float
) -> None:
    assert window.used == used
    assert window.wait_s(cost, limit) == pytest.approx(wait_s)


async def test_a_key_without_limits_is_never_refused() -> None:
    limiter = Limiter()
    reservations = [await limiter.admit(key(), 10**9) for _ in range(50)]
    assert all(not each.headers for each in reservations)


async def test_requests_beyond_the_limit_are_refused_with_the_time_to_wait() -> None:
    limiter = Limiter()
    limited = key(requests_per_minute=3)
    headers = [(await limiter.admit(limited, 1)).headers for _ in range(3)]
    assert [each["x-ratelimit-remaining-requests"] for each in headers] == ["2", "1", "0"]
    refused = await outcome(limiter, limited)
    assert isinstance(refused, LimitError)
    assert refused.reason == "requests"
    assert 1 <= int(refused.headers["Retry-After"]) <= 2 * MINUTE_S
    assert "alice may use 3 requests in a minute: 3 are used. Try again in" in refused.message
    assert refused.headers["x-ratelimit-limit-requests"] == "3"
    assert 0 < int(refused.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 2 * MINUTE_S
    assert await admitted(limiter, Key("bob", limited.policy))


async def test_unused_tokens_are_given_back() -> None:
    limiter = Limiter()
    limited = key(tokens_per_minute=100)
    first = await limiter.admit(limited, 90)
    assert not await admitted(limiter, limited, 20)
    await first.settle(30)  # 60 were reserved for nothing
    assert await admitted(limiter, limited, 70)  # 60 of them, and 10 of the limit
    assert not await admitted(limiter, limited, 1)


async def test_unused_tokens_do_not_count_in_the_next_minute_either() -> None:
    now_s = NOVEMBER_S
    limiter = Limiter(clock=lambda: now_s)
    for _ in range(5):
        reservation = await limiter.admit(key(tokens_per_minute=5000), 4200)
        await reservation.settle(220)
        now_s += 61


async def test_tokens_are_given_back_to_the_minute_that_counted_them() -> None:
    now_s = NOVEMBER_S
    limiter = Limiter(clock=lambda: now_s)
    limited = key(tokens_per_minute=100)
    first = await limiter.admit(limited, 100)
    now_s += MINUTE_S
    assert not await admitted(limiter, limited, 10)
    await first.settle(0)
    second = await limiter.admit(limited, 100)
    now_s += 2 * MINUTE_S
    third = await limiter.admit(limited, 100)
    await second.settle(0)  # its minute no longer counts
    assert not await admitted(limiter, limited, 1)
    await third.settle(99)
    assert await admitted(limiter, limited, 1)


async def test_after_an_answer_longer_than_reserved_a_request_has_to_wait() -> None:
    limiter = Limiter(clock=lambda: NOVEMBER_S)
    limited = key(tokens_per_minute=1000)
    first = await limiter.admit(limited, 266)
    await first.settle(2010)
    refused = await outcome(limiter, limited, 30)
    assert isinstance(refused, LimitError)
    assert refused.headers["Retry-After"] == "92"  # the next minute, until 970 of the 2010 tokens are left of this one
    assert "2010 are used, this request asks for 30. Try again in 92 s." in refused.message
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_a_request_whose_usage_is_unknown_counts_as_reserved() -> None:
    limiter = Limiter()
    limited = key(tokens_per_minute=100)
    await (await limiter.admit(limited, 90)).settle(None)
    assert not await admitted(limiter, limited, 20)


async def test_a_refused_request_counts_against_nothing() -> None:
    limiter = Limiter()
    limited = key(tokens_per_minute=100, requests_per_minute=1, concurrent_requests=5)
    held = await limiter.admit(limited, 60)
    for _ in range(6):
        refused = await outcome(limiter, limited, 40)
        assert isinstance(refused, LimitError)
        assert refused.reason == "requests"
    await held.settle(60)
    assert await admitted(limiter, key(tokens_per_minute=100, concurrent_requests=5), 40)


async def test_a_request_that_can_never_be_allowed_is_not_to_be_repeated() -> None:
    refused = await outcome(Limiter(), key(tokens_per_minute=100), 101)
    assert isinstance(refused, LimitError)
    assert refused.headers["x-should-retry"] == "false"
    assert "asks for 101 tokens" in refused.message
    assert "lower max_tokens" in refused.message


async def test_requests_at_a_time_are_bounded_and_given_back_when_they_end() -> None:
    limiter = Limiter()
    limited = key(concurrent_requests=2)
    first, _ = [await limiter.admit(limited, 1) for _ in range(2)]
    refused = await outcome(limiter, limited)
    assert isinstance(refused, LimitError)
    assert refused.reason == "concurrent_requests"
    await first.settle(1)
    assert await admitted(limiter, limited)
    assert not await admitted(limiter, limited)


@pytest.mark.parametrize(("limit", "replicas", "each"), [(12, 1, 12), (12, 3, 4), (13, 3, 4), (2, 3, 1)])
async def test_without_redis_each_gateway_allows_its_share(limit: int, replicas: int, each: int) -> None:
    for limits in ({"requests_per_minute": limit}, {"concurrent_requests": limit}, {"tokens_per_minute": limit}):
        limiter = Limiter(replicas=replicas)
        assert [await admitted(limiter, key(**limits)) for _ in range(limit + 1)].count(True) == each
    refused = await outcome(Limiter(replicas=3), key(tokens_per_minute=30), 11)
    assert "alice may use 10 in a minute at this gateway, 1/3 of its limit" in str(refused)


def test_a_monthly_budget_needs_redis() -> None:
    assert Limiter().why_unusable(key()) is None
    assert "a monthly budget needs Redis" in str(Limiter().why_unusable(key(monthly_tokens=5)))


@pytest.mark.parametrize("url", ["localhost:6379", "http://redis", ""])
def test_what_is_no_url_of_redis_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected redis://HOST:PORT/DB"):
        SharedCounters(url)


@pytest.fixture(scope="module")
def redis_server(redis_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = redis_of(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def gateways(
    redis_server: Any,
) -> AsyncIterator[Callable[..., list[Limiter]]]:
    """Limiters of several gateways with one Redis, which is empty at first."""
    opened: list[SharedCounters] = []

    def make(count: int, clock: Callable[[], float] = lambda: NOVEMBER_S, replicas: int = 3) -> list[Limiter]:
        opened.extend(SharedCounters(redis_server.url) for _ in range(count))
        return [Limiter(each, replicas, clock) for each in opened[-count:]]

    flushing = SharedCounters(redis_server.url)
    await flushing._redis.flushall()
    await flushing.close()
    yield make
    for each in opened:
        await each.close()


@pytest.mark.slow
async def test_three_gateways_admit_the_requests_of_a_minute_within_two_percent(gateways: Any) -> None:
    limiters = gateways(3)
    limited = key(requests_per_minute=300)

    async def client(limiter: Limiter) -> int:
        return [await admitted(limiter, limited) for _ in range(30)].count(True)

    assert 294 <= sum(await asyncio.gather(*map(client, limiters * 5))) <= 306


@pytest.mark.slow
async def test_three_gateways_exceed_the_tokens_of_a_minute_by_at_most_one_request_each(gateways: Any) -> None:
    limiters = gateways(3)
    limited, reserved, used = key(tokens_per_minute=20_000), 500, 130

    async def client(limiter: Limiter) -> int:
        """Sends requests until one is refused; returns the tokens that they used."""
        total = 0
        while isinstance(reservation := await outcome(limiter, limited, reserved), Reservation):
            await reservation.settle(used)
            total += used
        return total

    total = sum(await asyncio.gather(*map(client, limiters * 2)))
    assert 20_000 - 6 * reserved <= total <= 20_000 + 3 * reserved  # each client leaves when it is first refused


@pytest.mark.slow
async def test_tokens_that_one_gateway_gives_back_are_free_at_all(gateways: Any) -> None:
    first, second = gateways(2)
    limited = key(tokens_per_minute=5000)
    reservation = await first.admit(limited, 4200)
    assert not await admitted(second, limited, 1000)
    await reservation.settle(220)
    assert await admitted(second, limited, 4700)
    assert not await admitted(first, limited, 500)


@pytest.fixture(params=["local", pytest.param("redis", marks=pytest.mark.slow)])
def counters(request: pytest.FixtureRequest) -> Counters:
    if request.param == "local":
        return LocalCounters(lambda: NOVEMBER_S)
    (limiter,) = request.getfixturevalue("gateways")(1)
    shared: Counters = limiter._shared
    return shared


async def test_a_corrected_count_is_of_its_minute_and_never_below_zero(counters: Counters) -> None:
    _, window = await counters.hit("alice", 50, 100)
    await counters.correct("alice", window.minute - 5, 40)
    await counters.correct("alice", window.minute, -99)
    assert (await counters.hit("alice", 90, 100))[0]
    assert not (await counters.hit("alice", 20, 100))[0]


@pytest.mark.slow
async def test_requests_at_a_time_are_counted_over_all_gateways(gateways: Any) -> None:
    limiters = gateways(3)
    limited = key(concurrent_requests=10)
    outcomes = await asyncio.gather(*(outcome(limiters[index % 3], limited) for index in range(30)))
    granted = [each for each in outcomes if isinstance(each, Reservation)]
    assert len(granted) == 10
    for each in granted[:4]:
        await each.settle(1)
    assert [await admitted(limiters[index % 3], limited) for index in range(6)].count(True) == 4


@pytest.mark.slow
async def test_the_requests_of_a_gateway_that_has_died_end_with_their_leases(gateways: Any, redis_server: Any) -> None:
    dead, alive = gateways(2)
    limited = key(concurrent_requests=1)
    await dead.admit(limited, 1)
    await dead.renew()
    assert not await admitted(alive, limited)
    client = SharedCounters(redis_server.url)
    lease_key = "llmservice:requests:alice"
    ((_, ends_ms),) = await client._redis.zrange(lease_key, 0, -1, withscores=True)
    seconds, _ = await client._redis.time()
    assert 55 <= ends_ms / 1000 - seconds <= 61
    (member,) = await client._redis.zrange(lease_key, 0, -1)
    await client._redis.zadd(lease_key, {member: seconds * 1000 - 1})  # as it is a minute later
    assert await admitted(alive, limited)
    await dead.renew()  # it does not come back
    assert await client._redis.zcard(lease_key) == 1
    await client.close()


@pytest.mark.slow
async def test_a_monthly_budget_is_of_all_gateways_and_of_the_calendar_month(gateways: Any) -> None:
    now_s = NOVEMBER_S
    first, second = gateways(2, clock=lambda: now_s)
    limited = key(monthly_tokens=1000)
    reservation = await first.admit(limited, 800)
    refused = await outcome(second, limited, 300)
    assert isinstance(refused, LimitError)
    assert (refused.reason, refused.code) == ("monthly_tokens", "insufficient_quota")
    assert int(refused.headers["Retry-After"]) == 6 * 24 * 3600 + 12 * 3600  # the first of December, 0:00
    await reservation.settle(100)
    await (await second.admit(limited, 900)).settle(900)
    assert not await admitted(first, limited)
    now_s = DECEMBER_S
    assert await admitted(first, limited, 1000)
    assert not await admitted(second, limited)


@pytest.mark.slow
async def test_a_request_that_another_limit_refuses_is_given_back_to_the_budget(
    gateways: Any, redis_server: Any
) -> None:
    (limiter,) = gateways(1)
    limited = key(monthly_tokens=1000, requests_per_minute=1)
    await limiter.admit(limited, 400)
    assert not await admitted(limiter, limited, 400)
    client = SharedCounters(redis_server.url)
    assert await client._redis.get(budget_key("alice", NOVEMBER_S)) == b"400"
    await client.close()


@pytest.mark.slow
async def test_without_redis_requests_go_on_under_local_limits_until_it_is_back(
    redis_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llmservice_gateway.access.limits")
    now_s = NOVEMBER_S
    server = redis_of(tmp_path)
    shared = SharedCounters(server.url)
    limiter = Limiter(shared, replicas=3, clock=lambda: now_s)
    limited = key(requests_per_minute=30, concurrent_requests=100, monthly_tokens=10_000, tokens_per_minute=30_000)
    async with AsyncExitStack() as stack:
        stack.callback(server.stop)
        stack.push_async_callback(shared.close)
        server.start()
        before = [await limiter.admit(limited, 100) for _ in range(20)]
        assert limiter.counts_together
        server.stop()
        assert [await admitted(limiter, limited) for _ in range(30)].count(True) == 10
        assert not limiter.counts_together
        for reservation in before:
            await reservation.settle(30)
        await (await limiter.admit(Key("alice", Policy(monthly_tokens=10_000)), 500)).settle(200)
        server.start()
        assert not await admitted(limiter, limited)  # it is not asked at each request
        now_s += 1
        assert await admitted(limiter, limited)
        assert limiter.counts_together
        assert int(await shared._redis.get(budget_key("alice", now_s))) == 20 * (30 - 100) + 200 + 1
        messages = [record.message for record in caplog.records]
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"], messages
        assert "allows 1/3 of each limit" in messages[0]


@pytest.mark.slow
async def test_a_lost_redis_is_noticed_between_requests(redis_of: Any, tmp_path: Path) -> None:
    server = redis_of(tmp_path)
    limiter = Limiter(SharedCounters(server.url))
    metrics = GatewayMetrics()
    Access(cast("Any", None), limiter, metrics)

    async def shared_after_renewal() -> float | None:
        await limiter.renew()
        return metrics.registry.get_sample_value("llmservice_gateway_limits_shared")

    try:
        assert await shared_after_renewal() == 0, "it is down from the start"
        server.start()
        assert await shared_after_renewal() == 1
        server.stop()
        assert await shared_after_renewal() == 0
    finally:
        server.stop()
        await limiter.close()


def test_without_redis_there_is_no_metric_to_alert_on() -> None:
    metrics = GatewayMetrics()
    Access(cast("Any", None), Limiter(), metrics)
    assert math.isnan(metrics.registry.get_sample_value("llmservice_gateway_limits_shared") or 0)
