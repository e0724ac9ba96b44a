"""A failing batch, with a device that fails for chosen items."""

import logging
from itertools import chain

import pytest

from llmservice_server.engine.engine import execute_isolated


class Device:
    """Answers each number with ten times it; fails for the `broken`, and for more than `most` at a time."""

    def __init__(self, *broken: int, most: int = 1000) -> None:
        self.broken = set(broken)
        self.most = most
        self.num_recoveries = 0

    def execute(self, batch: list[int]) -> list[int]:
        if len(batch) > self.most or self.broken.intersection(batch):
            raise RuntimeError("out of memory while computing the prompt 'secret'")
        return [10 * number for number in batch]

    def recover(self) -> None:
        self.num_recoveries += 1


def test_a_batch_that_succeeds_is_computed_once() -> None:
    device = Device()
    assert execute_isolated(device.execute, device.recover, list(range(4))) == ([[0, 10, 20, 30]], [])
    assert device.num_recoveries == 0


@pytest.mark.parametrize("broken", [(0,), (5,), (1, 2), (0, 3, 6), tuple(range(7))])
def test_only_items_that_make_a_batch_fail_fail_and_the_other_results_keep_their_order(broken: tuple[int, ...]) -> None:
    device = Device(*broken)
    results, failed = execute_isolated(device.execute, device.recover, list(range(7)))
    assert [number for number, _ in failed] == list(broken)
    assert list(chain(*results)) == [10 * number for number in range(7) if number not in broken]
    assert device.num_recoveries > 0


def test_a_batch_that_is_too_large_is_computed_in_parts() -> None:
    device = Device(most=2)
    results, failed = execute_isolated(device.execute, device.recover, list(range(7)))
    assert (list(chain(*results)), failed) == ([10 * number for number in range(7)], [])


def test_the_error_names_its_kind_and_its_message_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, failed = execute_isolated(Device(0).execute, Device().recover, [0])
    assert [problem for _, problem in failed] == [
        "the engine failed to compute this request (RuntimeError): see the server's log"
    ]
    assert "a step of 1 sequences failed" in caplog.text


def test_a_lost_device_ends_the_engine() -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        execute_isolated(Device(0).execute, lost, [0, 1])
