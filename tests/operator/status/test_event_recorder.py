from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.status.event_recorder import EventRecorder
from llmservice_operator.status.events import scaled_event

NOW = 1_700_000_000.0
KEY = ("team-a", "tiny")
EVENTS = "/api/v1/namespaces/team-a/events"


@pytest.fixture
def event_at(service_of: Any) -> Any:
    """The same news at any moment."""
    return lambda now, replicas=2: scaled_event(service_of(), 1, replicas, ["queue: 9 waiting"], now)


async def posted(kube: KubeClient) -> list[tuple[str, int]]:
    events = (await kube.request("GET", EVENTS))["items"]
    return sorted((event["message"][:6], event["count"]) for event in events)


async def test_what_is_told_again_is_counted(kube: KubeClient, event_at: Any) -> None:
    recorder = EventRecorder(kube)

    for seconds in (0, 30, 60):
        await recorder.post(*KEY, [event_at(NOW + seconds)], NOW + seconds)
    await recorder.post(*KEY, [event_at(NOW + 90, replicas=3)], NOW + 90)

    assert await posted(kube) == [("1 -> 2", 3), ("1 -> 3", 1)]
    (event,) = [one for one in (await kube.request("GET", EVENTS))["items"] if one["count"] == 3]
    assert (event["firstTimestamp"], event["lastTimestamp"]) == ("2023-11-14T22:13:20Z", "2023-11-14T22:14:20Z")


async def test_after_a_while_it_is_news_again(kube: KubeClient, event_at: Any) -> None:
    recorder = EventRecorder(kube)

    for seconds in (0, 601):
        await recorder.post(*KEY, [event_at(NOW + seconds)], NOW + seconds)

    assert await posted(kube) == [("1 -> 2", 1), ("1 -> 2", 1)]


async def test_an_event_that_the_api_server_forgot_is_posted_anew(kube: KubeClient, event_at: Any) -> None:
    recorder = EventRecorder(kube)
    first = event_at(NOW)
    await recorder.post(*KEY, [first], NOW)
    await kube.request("DELETE", f"{EVENTS}/{first['metadata']['name']}")

    await recorder.post(*KEY, [event_at(NOW + 5)], NOW + 5)

    assert await posted(kube) == [("1 -> 2", 1)]


async def test_a_lost_event_stops_nobody(kube: KubeClient, event_at: Any, caplog: pytest.LogCaptureFixture) -> None:
    lost = event_at(NOW)
    lost["metadata"]["namespace"] = "nowhere"

    await EventRecorder(kube).post(*KEY, [lost, event_at(NOW)], NOW)

    assert await posted(kube) == [("1 -> 2", 1)]
    assert "event not posted" in caplog.text


async def test_what_the_api_server_could_not_take_is_posted_in_the_next_pass(kube: KubeClient, event_at: Any) -> None:
    recorder, event = EventRecorder(kube), event_at(NOW)
    kube.may_write_s = lambda: 0.0
    await recorder.post(*KEY, [event], NOW)
    assert await posted(kube) == []

    kube.may_write_s = None
    await recorder.post("team-a", "another", [], NOW)
    assert await posted(kube) == []
    await recorder.post(*KEY, [], NOW + 2)

    assert await posted(kube) == [("1 -> 2", 1)]


async def test_an_event_whose_answer_was_lost_is_not_posted_twice(kube: KubeClient, event_at: Any) -> None:
    event = event_at(NOW)
    await kube.create_event(event)
    recorder = EventRecorder(kube)

    await recorder.post(*KEY, [event], NOW)
    await recorder.post(*KEY, [event_at(NOW + 5)], NOW + 5)

    assert await posted(kube) == [("1 -> 2", 2)]


async def test_nothing_waits_for_a_service_that_is_gone(kube: KubeClient, event_at: Any) -> None:
    recorder = EventRecorder(kube)
    kube.may_write_s = lambda: 0.0
    await recorder.post(*KEY, [event_at(NOW)], NOW)
    kube.may_write_s = None

    recorder.forget(*KEY)
    await recorder.post(*KEY, [], NOW)

    assert await posted(kube) == []
