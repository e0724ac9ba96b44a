"""Lanes, deadlines, salts and full queues, as a client sees them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

LONG = {"model": "tiny", "prompt": [5] * 4, "max_tokens": 480, "ignore_eos": True, "temperature": 0}
ONE_AT_A_TIME = ("--max-num-seqs", "1", "--max-queued-batch-requests", "3")


def post(server: Any, body: dict[str, Any], **headers: str) -> tuple[int, Any, Any]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = server.send("POST", "/v1/completions", body, names)
    return answer.status, json.loads(answer.body), answer.headers


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def flood(server: Any, threads: ThreadPoolExecutor, number: int, **fields: Any) -> list[Future[Any]]:
    """Long requests, of which one runs and the others wait."""
    sent = [threads.submit(post, server, LONG | fields) for _ in range(number)]
    lane = fields.get("priority", "interactive")
    server.wait_for(lambda: server.metric("llmservice_num_requests_waiting", lane=lane) >= number - 1 or None)
    return sent


def test_body_and_header_name_the_lane(shared_server: Callable[..., Any], threads: ThreadPoolExecutor) -> None:
    server = shared_server(*ONE_AT_A_TIME)
    running = flood(server, threads, 2)
    batch = flood(server, threads, 2, priority="batch")
    header = threads.submit(post, server, LONG, x_llmservice_lane="batch")
    server.wait_for(lambda: server.metric("llmservice_num_requests_waiting", lane="batch") == 3 or None)
    assert post(server, LONG | {"priority": "urgent"})[0] == 400
    assert post(server, LONG, x_llmservice_lane="urgent")[0] == 400
    assert [sent.result()[0] for sent in [*running, *batch, header]] == [200] * 5
    server.wait_until_idle()


def test_a_request_leaves_the_queue_when_its_own_limit_is_over(
    shared_server: Callable[..., Any], threads: ThreadPoolExecutor
) -> None:
    server = shared_server(*ONE_AT_A_TIME)
    running = flood(server, threads, 3)
    status, answer, _ = post(server, LONG, x_llmservice_queue_timeout="0.05")
    assert status == 504
    assert "longer than it may: try again later" in answer["error"]["message"]
    status, answer, _ = post(server, LONG, x_llmservice_timeout="0.05")
    assert status == 504
    assert "deadline passed" in answer["error"]["message"]
    assert [sent.result()[0] for sent in running] == [200] * 3


def test_the_servers_queue_timeout_applies_to_all(
    start_server: Callable[..., Any], threads: ThreadPoolExecutor
) -> None:
    server = start_server("--max-num-seqs", "1", "--queue-timeout", "50ms").wait_until_ready()
    statuses = [sent.result()[0] for sent in [threads.submit(post, server, LONG) for _ in range(8)]]
    assert set(statuses) == {200, 504}


def test_a_full_batch_queue_refuses_batch_work_only_and_says_when_to_come_again(
    shared_server: Callable[..., Any], threads: ThreadPoolExecutor
) -> None:
    server = shared_server(*ONE_AT_A_TIME)
    running = flood(server, threads, 6)  # of which one takes less time than a loaded machine needs to look
    waiting = flood(server, threads, 4, priority="batch")[1:]
    status, answer, headers = post(server, LONG | {"priority": "batch"})
    assert status == 429
    assert "the batch queue is full" in answer["error"]["message"]
    assert 1 <= int(headers["retry-after"]) <= 60
    assert post(server, LONG | {"max_tokens": 1})[0] == 200
    assert {sent.result()[0] for sent in [*running, *waiting]} <= {200, 429}


def test_usage_tells_the_cached_tokens_and_a_salt_shares_them_with_its_like_only(server: Any) -> None:
    body = {"model": "tiny", "prompt": [77] * 40, "max_tokens": 1}
    queries, hits = (server.metric(f"llmservice_prefix_cache_{name}_total") for name in ("queries", "hits"))

    def cached(**fields: str) -> int:
        status, answer, _ = post(server, body | fields)
        assert status == 200
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached()] == [0, 32]
    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a")] == [0, 0, 32]
    assert server.metric("llmservice_prefix_cache_queries_total") == queries + 200
    assert server.metric("llmservice_prefix_cache_hits_total") == hits + 64
