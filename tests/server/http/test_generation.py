import pytest

from llmservice_server.http.error import ApiError
from llmservice_server.http.generation import RequestOptions, request_options


def options(
    headers: dict[str, str],
    priority: str | int = 0,
    limit_s: float | None = 60.0,
    default_lane: str = "interactive",
) -> RequestOptions:
    return request_options(
        headers, priority, arrival_s=0.0, default_lane=default_lane, timeout_s=limit_s, queue_timeout_s=None
    )


@pytest.mark.parametrize(
    ("default", "header", "priority", "lane"),
    [
        ("interactive", None, 0, "interactive"),
        ("interactive", "batch", -5, "batch"),
        ("interactive", "batch", "interactive", "interactive"),
        ("interactive", None, "batch", "batch"),
        ("batch", None, 0, "batch"),
        ("batch", "batch", 0, "batch"),
        ("batch", "interactive", "batch", "batch"),
    ],
)
def test_the_body_names_the_lane_before_the_header_and_that_before_the_default(
    default: str, header: str | None, priority: str | int, lane: str
) -> None:
    headers = {} if header is None else {"x-llmservice-lane": header}
    assert options(headers, priority, default_lane=default).lane == lane


@pytest.mark.parametrize(
    ("header", "priority", "param"),
    [("interactive", 0, None), (None, "interactive", "priority"), ("batch", "interactive", "priority")],
)
def test_a_lane_above_the_default_is_refused(header: str | None, priority: str | int, param: str | None) -> None:
    headers = {} if header is None else {"x-llmservice-lane": header}
    with pytest.raises(ApiError) as refused:
        options(headers, priority, default_lane="batch")
    error = refused.value
    assert (error.status, error.type, error.code) == (403, "invalid_request_error", "lane_not_allowed")
    assert error.param == param
    assert "asks for the lane interactive, but batch is the highest" in error.message
    assert "spec.lanes.default" in error.message


@pytest.mark.parametrize(("limit_s", "asked", "timeout_s"), [(60.0, "5", 5), (60.0, "90", 60), (None, "90.5", 90.5)])
def test_a_client_may_shorten_the_servers_limit_but_not_lengthen_it(
    limit_s: float | None, asked: str, timeout_s: float
) -> None:
    assert options({"x-llmservice-timeout": asked}, limit_s=limit_s).timeout_s == timeout_s


def test_a_queue_timeout_of_its_own_needs_none_of_the_servers() -> None:
    assert options({}).queue_timeout_s is None
    assert options({"x-llmservice-queue-timeout": "2"}).queue_timeout_s == 2


@pytest.mark.parametrize(
    "headers",
    [
        {"x-llmservice-lane": "fast"},
        {"x-llmservice-timeout": "soon"},
        {"x-llmservice-timeout": "0"},
        {"x-llmservice-timeout": "-1"},
        {"x-llmservice-queue-timeout": "nan"},
        {"x-llmservice-queue-timeout": "inf"},
    ],
)
def test_a_header_that_means_nothing_is_refused_by_name(headers: dict[str, str]) -> None:
    with pytest.raises(ApiError, match=next(iter(headers))) as refused:
        options(headers)
    assert refused.value.status == 400


def test_an_integer_priority_is_one_within_the_lane() -> None:
    assert (options({}, -3).lane, options({}, -3).priority) == ("interactive", -3)
    assert options({}, "batch").priority == 0
