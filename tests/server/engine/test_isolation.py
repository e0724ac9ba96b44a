"""A failing step, with a device that fails for whom it is told to."""

import logging
from itertools import chain

import pytest

from llmservice_server.engine.isolation import execute_isolated
from llmservice_server.engine.plan import Plan, Scheduled
from llmservice_server.engine.request import Request
from llmservice_server.messages import Generate, SamplingParams


def plan_of(number: int) -> Plan:
    plan = Plan()
    for order in range(number):
        message = Generate(
            request_id=str(order), prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=4), arrival_s=0.0
        )
        request = Request.of(message, order, seed=0, eos_token_ids=frozenset())
        plan.scheduled.append(Scheduled(request, 0, 2, samples=order % 3 != 2))
    return plan


class Device:
    """Yields each sampling request's number; fails for the `broken`, and for more than `most` at a time."""

    def __init__(self, *broken: int, most: int = 1000) -> None:
        self.broken = {str(number) for number in broken}
        self.most = most
        self.num_recoveries = 0

    def execute(self, plan: Plan) -> list[int]:
        if len(plan.scheduled) > self.most or any(share.request.request_id in self.broken for share in plan.scheduled):
            raise RuntimeError("out of memory while computing the prompt 'secret'")
        return [int(share.request.request_id) for share in plan.scheduled if share.samples]

    def recover(self) -> None:
        self.num_recoveries += 1


def test_a_step_that_succeeds_is_computed_once() -> None:
    device = Device()
    assert execute_isolated(device.execute, device.recover, plan_of(4)) == ([[0, 1, 3]], {})
    assert device.num_recoveries == 0


@pytest.mark.parametrize("broken", [(0,), (5,), (1, 2), (0, 3, 6), tuple(range(7))])
def test_only_those_who_make_a_step_fail_fail_and_the_others_results_keep_their_order(broken: tuple[int, ...]) -> None:
    device = Device(*broken)
    results, failed = execute_isolated(device.execute, device.recover, plan_of(7))
    assert {int(request.request_id) for request in failed} == set(broken)
    assert list(chain(*results)) == [number for number in (0, 1, 3, 4, 6) if number not in broken]
    assert device.num_recoveries > 0


def test_a_step_that_is_too_large_is_computed_in_parts() -> None:
    device = Device(most=2)
    results, failed = execute_isolated(device.execute, device.recover, plan_of(7))
    assert (list(chain(*results)), failed) == ([0, 1, 3, 4, 6], {})


def test_the_error_names_its_kind_and_keeps_what_it_said_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, failed = execute_isolated(Device(0).execute, Device().recover, plan_of(1))
    assert list(failed.values()) == ["the engine failed to compute this request (RuntimeError): see the server's log"]
    assert "a step of 1 sequences failed" in caplog.text


def test_a_lost_device_ends_the_engine() -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        execute_isolated(Device(0).execute, lost, plan_of(2))
