from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.status import LLMServiceStatus
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.status.conditions import Verdict, conditions
from llmservice_operator.status.events import EventRecorder, scaled_event, transition_events

NOW = 1_700_000_000.0


def status(*verdicts: Verdict) -> LLMServiceStatus:
    return LLMServiceStatus(conditions=conditions([], verdicts, 1, NOW))


def with_status(service: LLMService, before: LLMServiceStatus) -> LLMService:
    return service.model_copy(update={"status": before})


def test_a_new_service_has_an_event_about_its_sizing_and_not_its_start(service_of: Any) -> None:
    after = status(Verdict("Ready", "False", "Starting", "a"), Verdict("SizingValid", "True", "Fits", "b"))

    assert [event["reason"] for event in transition_events(service_of(), after, NOW)] == ["Fits"]


def test_a_changed_message_alone_makes_no_event(service_of: Any) -> None:
    service = with_status(service_of(), status(Verdict("Ready", "True", "Serving", "1 of 1")))

    assert transition_events(service, status(Verdict("Ready", "True", "Serving", "2 of 2")), NOW) == []


def test_a_problem_is_a_warning_about_the_service(service_of: Any) -> None:
    service = with_status(service_of(), status(Verdict("Ready", "True", "Serving", "1 of 1")))

    (event,) = transition_events(service, status(Verdict("Ready", "False", "OOMKilled", "killed")), NOW)

    assert (event["type"], event["reason"]) == ("Warning", "OOMKilled")
    assert event["involvedObject"]["uid"] == "uid-of-tiny"
    assert event["message"] == "Ready is False: killed"


@pytest.mark.parametrize(
    ("verdict", "warned"),
    [
        (Verdict("NameTaken", "True", "NameTaken", "m"), ["Warning"]),
        (Verdict("Degraded", "True", "KernelFallback", "m"), ["Warning"]),
        (Verdict("AdaptersReady", "False", "AdapterLoadFailed", "m"), ["Warning"]),
        (Verdict("AdaptersReady", "False", "AdaptersLoading", "m"), []),
        (Verdict("InferencePoolReady", "False", "CRDNotInstalled", "m"), ["Warning"]),
        (Verdict("GatewayOnly", "False", "DirectAccess", "m"), []),
    ],
)
def test_a_condition_that_begins_as_a_problem_is_a_warning(
    verdict: Verdict, warned: list[str], service_of: Any
) -> None:
    assert [event["type"] for event in transition_events(service_of(), status(verdict), NOW)] == warned


def test_an_event_of_scaling_has_both_numbers_and_the_reasons(service_of: Any) -> None:
    event = scaled_event(service_of(), 1, 3, ["queue: 18 waiting -> 3"], NOW)

    assert (event["reason"], event["type"]) == ("ScaledUp", "Normal")
    assert event["message"] == "1 -> 3 replicas: queue: 18 waiting -> 3"


NOW = 1_700_000_000.0
KEY = ("team-a", "tiny")
EVENTS = "/api/v1/namespaces/team-a/events"


@pytest.fixture
def event_at(service_of: Any) -> Any:
    """The same Event at any time."""
    return lambda now, replicas=2: scaled_event(service_of(), 1, replicas, ["queue: 9 waiting"], now)


async def posted(kube: KubeClient) -> list[tuple[str, int]]:
    events = (await kube.request("GET", EVENTS))["items"]
    return sorted((event["message"][:6], event["count"]) for event in events)


async def test_a_repeated_event_is_counted(kube: KubeClient, event_at: Any) -> None:
    recorder = EventRecorder(kube)

    for seconds in (0, 30, 60):
        await recorder.post(*KEY, [event_at(NOW + seconds)], NOW + seconds)
    await recorder.post(*KEY, [event_at(NOW + 90, replicas=3)], NOW + 90)

    assert await posted(kube) == [("1 -> 2", 3), ("1 -> 3", 1)]
    (event,) = [one for one in (await kube.request("GET", EVENTS))["items"] if one["count"] == 3]
    assert (event["firstTimestamp"], event["lastTimestamp"]) == ("2023-11-14T22:13:20Z", "2023-11-14T22:14:20Z")


async def test_a_repeated_event_is_posted_anew_after_ten_minutes(kube: KubeClient, event_at: Any) -> None:
    recorder = EventRecorder(kube)

    for seconds in (0, 601):
        await recorder.post(*KEY, [event_at(NOW + seconds)], NOW + seconds)

    assert await posted(kube) == [("1 -> 2", 1), ("1 -> 2", 1)]


async def test_an_event_that_has_expired_is_posted_anew(kube: KubeClient, event_at: Any) -> None:
    recorder = EventRecorder(kube)
    first = event_at(NOW)
    await recorder.post(*KEY, [first], NOW)
    await kube.request("DELETE", f"{EVENTS}/{first['metadata']['name']}")

    await recorder.post(*KEY, [event_at(NOW + 5)], NOW + 5)

    assert await posted(kube) == [("1 -> 2", 1)]


async def test_a_failed_event_does_not_stop_the_others(
    kube: KubeClient, event_at: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lost = event_at(NOW)
    lost["metadata"]["namespace"] = "nowhere"

    await EventRecorder(kube).post(*KEY, [lost, event_at(NOW)], NOW)

    assert await posted(kube) == [("1 -> 2", 1)]
    assert "event not posted" in caplog.text


async def test_events_that_fail_for_the_moment_are_posted_in_the_next_pass(kube: KubeClient, event_at: Any) -> None:
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


async def test_pending_events_of_a_deleted_service_are_dropped(kube: KubeClient, event_at: Any) -> None:
    recorder = EventRecorder(kube)
    kube.may_write_s = lambda: 0.0
    await recorder.post(*KEY, [event_at(NOW)], NOW)
    kube.may_write_s = None

    recorder.forget(*KEY)
    await recorder.post(*KEY, [], NOW)

    assert await posted(kube) == []
