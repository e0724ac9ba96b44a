import pytest

from llmservice_server.api.error import ApiError
from llmservice_server.api.terms import Terms, terms_of


def terms(headers: dict[str, str], priority: str | None = None, limit_s: float | None = 60.0) -> Terms:
    return terms_of(headers, priority, default_lane="batch", timeout_s=limit_s, queue_timeout_s=None)


def test_the_body_names_the_lane_before_the_header_and_that_before_the_key() -> None:
    header = {"x-llmservice-lane": "interactive"}
    assert terms({}).lane == "batch"
    assert terms(header).lane == "interactive"
    assert terms(header, priority="batch").lane == "batch"


@pytest.mark.parametrize(("limit_s", "asked", "timeout_s"), [(60.0, "5", 5), (60.0, "90", 60), (None, "90.5", 90.5)])
def test_a_client_may_shorten_the_servers_limit_but_not_lengthen_it(
    limit_s: float | None, asked: str, timeout_s: float
) -> None:
    assert terms({"x-llmservice-timeout": asked}, limit_s=limit_s).timeout_s == timeout_s


def test_a_queue_timeout_of_its_own_needs_none_of_the_servers() -> None:
    assert terms({}).queue_timeout_s is None
    assert terms({"x-llmservice-queue-timeout": "2"}).queue_timeout_s == 2


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
        terms(headers)
    assert refused.value.status == 400
