from __future__ import annotations

import asyncio
from itertools import pairwise

from llmservice_operator.cluster.priority_gate import PriorityGate


class Line:
    """Visitors of a gate with one place, which somebody holds until `opens`."""

    def __init__(self) -> None:
        self.gate = PriorityGate(1)
        self.opens = asyncio.Event()
        self.came: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def joins(self, name: str, patience_s: float) -> None:
        async def visit() -> None:
            async with self.gate.place(patience_s, name):
                await self.opens.wait()
                self.came.append(name)

        self.tasks[name] = asyncio.create_task(visit())
        await asyncio.sleep(0)

    async def all_done(self) -> list[str]:
        self.opens.set()
        async with asyncio.timeout(5):
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        return self.came


async def test_the_urgent_go_first_and_equals_in_the_order_in_which_they_came() -> None:
    line = Line()
    for name, patience_s in (
        ("holder", 10),
        ("tick", 10),
        ("child", 2),
        ("spec", 0),
        ("another spec", 0),
        ("late tick", 10),
    ):
        await line.joins(name, patience_s)

    assert await line.all_done() == ["holder", "spec", "another spec", "child", "tick", "late tick"]


async def test_who_becomes_urgent_while_waiting_moves_forward_and_comes_once() -> None:
    line = Line()
    for name, patience_s in (("holder", 10), ("tick", 10), ("child", 2), ("edited", 10)):
        await line.joins(name, patience_s)

    line.gate.hurry("edited", 0)
    line.gate.hurry("nobody", 0)

    assert await line.all_done() == ["holder", "edited", "child", "tick"]


async def test_patience_ends() -> None:
    line = Line()
    await line.joins("holder", 0)
    await line.joins("patient", 0.02)
    await asyncio.sleep(0.05)
    await line.joins("urgent", 0)

    assert await line.all_done() == ["holder", "patient", "urgent"]


async def test_who_leaves_the_line_takes_no_place_along() -> None:
    line = Line()
    for name, patience_s in (("holder", 0), ("impatient", 0), ("patient", 0)):
        await line.joins(name, patience_s)
    line.tasks["impatient"].cancel()

    assert await line.all_done() == ["holder", "patient"]


async def test_a_place_given_to_somebody_who_is_just_leaving_goes_to_the_next() -> None:
    gate, came = PriorityGate(1), []

    async def visit(name: str) -> None:
        async with gate.place(0):
            came.append(name)

    async with gate.place(0):
        leaving, following = asyncio.create_task(visit("leaving")), asyncio.create_task(visit("next"))
        await asyncio.sleep(0)
    leaving.cancel()  # the place was given to it in the line above
    async with asyncio.timeout(5):
        await following

    assert came == ["next"]


async def test_as_many_are_in_as_there_are_places() -> None:
    gate, inside, most = PriorityGate(3), 0, 0

    async def visit() -> None:
        nonlocal inside, most
        async with gate.place(0):
            inside += 1
            most = max(most, inside)
            for _ in range(10):
                await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(visit() for _ in range(20)))

    assert most == 3


async def test_of_many_who_come_together_one_is_let_in_at_each_turn_of_the_event_loop() -> None:
    gate, turn = PriorityGate(64), 0
    came_at: list[int] = []

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def visit() -> None:
        async with gate.place(0):
            came_at.append(turn)
            for _ in range(10):
                await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*(visit() for _ in range(20)))
    counting.cancel()

    assert [later - earlier for earlier, later in pairwise(came_at)] == [1] * 19


async def test_a_free_place_is_taken_at_once_whatever_was_hurried_before() -> None:
    gate = PriorityGate(2)
    go_on = asyncio.Event()

    async def visit() -> None:
        async with gate.place(0, "somebody"):
            await go_on.wait()

    async with gate.place(0), gate.place(0):
        waiting = asyncio.create_task(visit())
        await asyncio.sleep(0)
    gate.hurry("somebody", 0)  # has a place by now, and does not know it yet
    async with asyncio.timeout(1), gate.place(0):
        go_on.set()
    await waiting
