from __future__ import annotations

from typing import Any

from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.status import LLMServiceStatus
from llmservice_operator.status.conditions import Verdict, conditions
from llmservice_operator.status.events import scaled_event, transition_events

NOW = 1_700_000_000.0


def status(*verdicts: Verdict) -> LLMServiceStatus:
    return LLMServiceStatus(conditions=conditions([], verdicts, 1, NOW))


def with_status(service: LLMService, before: LLMServiceStatus) -> LLMService:
    return service.model_copy(update={"status": before})


def test_a_new_service_tells_its_sizing_and_not_that_it_starts(service_of: Any) -> None:
    after = status(Verdict("Ready", "False", "Starting", "a"), Verdict("SizingValid", "True", "Fits", "b"))

    assert [event["reason"] for event in transition_events(service_of(), after, NOW)] == ["Fits"]


def test_a_changed_message_alone_is_no_event(service_of: Any) -> None:
    service = with_status(service_of(), status(Verdict("Ready", "True", "Serving", "1 of 1")))

    assert transition_events(service, status(Verdict("Ready", "True", "Serving", "2 of 2")), NOW) == []


def test_what_is_wrong_is_a_warning_about_the_service(service_of: Any) -> None:
    service = with_status(service_of(), status(Verdict("Ready", "True", "Serving", "1 of 1")))

    (event,) = transition_events(service, status(Verdict("Ready", "False", "OOMKilled", "killed")), NOW)

    assert (event["type"], event["reason"]) == ("Warning", "OOMKilled")
    assert event["involvedObject"]["uid"] == "uid-of-tiny"
    assert event["message"] == "Ready is False: killed"


def test_scaling_tells_from_where_to_where_and_why(service_of: Any) -> None:
    event = scaled_event(service_of(), 1, 3, ["queue: 18 waiting -> 3"], NOW)

    assert (event["reason"], event["type"]) == ("ScaledUp", "Normal")
    assert event["message"] == "1 -> 3 replicas: queue: 18 waiting -> 3"
