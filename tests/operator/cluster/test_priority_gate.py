from __future__ import annotations

import asyncio
from itertools import pairwise

from llmservice_operator.cluster.priority_gate import PriorityGate


class Queue:
    """Waiters at a gate with one place, whose holders keep it until `opens`."""

    def __init__(self) -> None:
        self.gate = PriorityGate(1)
        self.opens = asyncio.Event()
        self.admitted: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def joins(self, name: str, patience_s: float) -> None:
        async def wait() -> None:
            async with self.gate.place(patience_s, name):
                await self.opens.wait()
                self.admitted.append(name)

        self.tasks[name] = asyncio.create_task(wait())
        await asyncio.sleep(0)

    async def all_done(self) -> list[str]:
        self.opens.set()
        async with asyncio.timeout(5):
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        return self.admitted


async def test_urgent_waiters_go_first_and_equal_ones_in_order() -> None:
    queue = Queue()
    for name, patience_s in (
        ("holder", 10),
        ("tick", 10),
        ("child", 2),
        ("spec", 0),
        ("another spec", 0),
        ("late tick", 10),
    ):
        await queue.joins(name, patience_s)

    assert await queue.all_done() == ["holder", "spec", "another spec", "child", "tick", "late tick"]


async def test_a_waiter_that_becomes_urgent_moves_forward_and_is_admitted_once() -> None:
    queue = Queue()
    for name, patience_s in (("holder", 10), ("tick", 10), ("child", 2), ("edited", 10)):
        await queue.joins(name, patience_s)

    queue.gate.hurry("edited", 0)
    queue.gate.hurry("nobody", 0)

    assert await queue.all_done() == ["holder", "edited", "child", "tick"]


async def test_a_patient_waiter_is_not_overtaken_for_ever() -> None:
    queue = Queue()
    await queue.joins("holder", 0)
    await queue.joins("patient", 0.02)
    await asyncio.sleep(0.05)
    await queue.joins("urgent", 0)

    assert await queue.all_done() == ["holder", "patient", "urgent"]


async def test_a_cancelled_waiter_takes_no_place() -> None:
    queue = Queue()
    for name, patience_s in (("holder", 0), ("impatient", 0), ("patient", 0)):
        await queue.joins(name, patience_s)
    queue.tasks["impatient"].cancel()

    assert await queue.all_done() == ["holder", "patient"]


async def test_the_place_of_a_waiter_cancelled_on_admission_goes_to_the_next() -> None:
    gate, admitted = PriorityGate(1), []

    async def wait(name: str) -> None:
        async with gate.place(0):
            admitted.append(name)

    async with gate.place(0):
        leaving, following = asyncio.create_task(wait("leaving")), asyncio.create_task(wait("next"))
        await asyncio.sleep(0)
    leaving.cancel()  # it was admitted at the end of the block above
    async with asyncio.timeout(5):
        await following

    assert admitted == ["next"]


async def test_there_are_as_many_holders_as_places() -> None:
    gate, inside, most = PriorityGate(3), 0, 0

    async def wait() -> None:
        nonlocal inside, most
        async with gate.place(0):
            inside += 1
            most = max(most, inside)
            for _ in range(10):
                await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(wait() for _ in range(20)))

    assert most == 3


async def test_one_waiter_is_admitted_in_each_iteration_of_the_event_loop() -> None:
    gate, turn = PriorityGate(64), 0
    came_at: list[int] = []

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def wait() -> None:
        async with gate.place(0):
            came_at.append(turn)
            for _ in range(10):
                await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*(wait() for _ in range(20)))
    counting.cancel()

    assert [later - earlier for earlier, later in pairwise(came_at)] == [1] * 19


async def test_a_free_place_is_taken_at_once_after_a_hurried_waiter() -> None:
    gate = PriorityGate(2)
    go_on = asyncio.Event()

    async def wait() -> None:
        async with gate.place(0, "waiter"):
            await go_on.wait()

    async with gate.place(0), gate.place(0):
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
    gate.hurry("waiter", 0)  # it is admitted, but has not run yet
    async with asyncio.timeout(1), gate.place(0):
        go_on.set()
    await waiting
