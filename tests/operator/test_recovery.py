"""Every call of a pass goes wrong, in one way or another, and the operator is killed before every call: enumerated.

Each scenario is played once undisturbed, which records its calls and its end; then once for each call and each fault
(`make test-soak`), or for each call with a kill and one other fault: these take turns.
However it was disturbed, it must end with the same objects, the same status and the same Events, repetitions apart,
and write nothing more once it is there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest

from harness.world.faulty_front import RETRY_AFTER_S, Call, Fault
from harness.world.jumping_loop import JumpingLoop
from harness.world.slow_cluster import STARTED_AFTER_S
from harness.world.whole_operator import TICK_S
from harness.world.whole_world import FROM_CRDS, NAMESPACE, World, whole_world

Object = dict[str, Any]

SHAPE = {"layers": 2, "heads": 4, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}
SPEC: Object = {
    "model": {"uri": "hf://org/name", "shape": SHAPE},
    "resources": {"gpu": {"product": "l4"}},
    "engine": {"maxModelLen": 512, "maxNumSeqs": 8},
}
AUTOSCALED: Object = {
    **SPEC,
    "autoscaling": {
        "maxReplicas": 4,
        "queueDepth": 2,
        "scaleUp": {"stabilization": "0s"},
        "scaleDown": {"stabilization": "0s"},
    },
}
STARTED_S = 3 * STARTED_AFTER_S
"""Until a service and its autoscaler are at rest."""
SETTLED_S = 1.2 * TICK_S
RECOVERED_S = 330.0
"""For what is collected, for pods that start, and for the longest pause after one fault, which a timeout and a backoff
make."""
QUIET_S = 1.2 * TICK_S


@dataclass(frozen=True)
class Scenario:
    """What stands before, and what is done then."""

    change: Callable[[World], None]
    spec: Object | None = None
    """Of the service that is there before; None: there is none, and the operator begins after the change."""
    load: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of the pods, before."""


def recreate(world: World) -> None:
    world.delete()
    world.create_service({**SPEC, "replicas": 1, "engine": {"maxModelLen": 256}})


def load(**in_flight: tuple[int, int]) -> dict[str, tuple[int, int]]:
    return {f"127.0.0.{place.removeprefix('pod')}": figures for place, figures in in_flight.items()}


SCENARIOS = {
    "first apply": Scenario(lambda world: world.create_service({**SPEC, "replicas": 2})),
    "a changed spec": Scenario(lambda world: world.edit({"engine": {"maxNumSeqs": 3}}), {**SPEC, "replicas": 2}),
    "a spec that does not fit": Scenario(
        lambda world: world.edit({"engine": {"maxModelLen": 9_000_000}}), {**SPEC, "replicas": 2}
    ),
    "more replicas": Scenario(lambda world: world.cluster.load.update(load(pod1=(8, 18))), AUTOSCALED),
    "fewer replicas": Scenario(
        lambda world: world.edit({"autoscaling": {"minReplicas": 1}}),
        {**SPEC, "autoscaling": {**AUTOSCALED["autoscaling"], "minReplicas": 3}},
        load(pod2=(3, 0)),
    ),
    "children that come and go": Scenario(
        lambda world: world.edit({"networkPolicy": {"enabled": False}, "monitoring": {"prometheusRule": False}}),
        {**SPEC, "replicas": 1, "monitoring": {"podMonitor": True, "prometheusRule": True}},
    ),
    "deleted and made anew": Scenario(recreate, {**SPEC, "replicas": 2}),
}


@dataclass(frozen=True)
class End:
    """How a play ended."""

    objects: dict[str, Object]
    events: set[tuple[str, str, str, str]]
    calls: list[Call]
    ended_s: float


class Stage:
    """Plays one scenario again and again, from the same beginning."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world = world
        self._scenario = scenario
        self._passed_s = 0.0

    async def prepare(self) -> None:
        """What stands before the change, as an operator left it that nothing disturbed."""
        for kind in FROM_CRDS:
            self.world.install(kind)
        self._before = self.world.registry.store.copy()
        if self._scenario.spec is None:
            return
        async with self._running(warm=True):
            self.world.create_service(self._scenario.spec)
            await asyncio.sleep(STARTED_S)
        self._before = self.world.registry.store.copy()
        self._passed_s = STARTED_S

    async def play(self, fault: Fault | None = None, at: int = -1) -> End:
        """One time, with at most one thing that goes wrong."""
        world, warm = self.world, self._scenario.spec is not None
        async with self._running(warm=warm) as (start, kill):
            if warm:
                await asyncio.sleep(SETTLED_S)
            world.front.arm(fault, at)
            self._scenario.change(world)
            if not warm:
                start()
            try:
                async with asyncio.timeout(RECOVERED_S):
                    await world.front.killed.wait()
                    kill()
                    await asyncio.sleep(1.0)
                    start()
                    await asyncio.Event().wait()
            except TimeoutError:
                pass
            world.front.disarm()
        ended_s = asyncio.get_running_loop().time()
        return End(objects_of(world), events_of(world), world.front.calls, ended_s)

    @asynccontextmanager
    async def _running(self, *, warm: bool) -> AsyncIterator[tuple[Callable[[], object], Callable[[], object]]]:
        """The world from its beginning; what is given starts an operator with an empty memory, and kills it."""
        world = self.world
        world.begin(self._before, self._passed_s)
        world.cluster.load = dict(self._scenario.load)
        tasks = [asyncio.create_task(world.cluster.run())]

        def start() -> None:
            tasks.append(asyncio.create_task(world.operator().run()))

        def kill() -> None:
            tasks[-1].cancel()

        if warm:
            start()
        try:
            yield start, kill
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


def objects_of(world: World) -> dict[str, Object]:
    """Everything in the namespace but Events, without what no two runs share: times, uids, versions, addresses."""
    found: dict[str, Object] = {}
    for kind in world.registry.kinds:
        if kind.namespaced and kind.name != "Event":
            for obj in world.registry.select(kind, NAMESPACE):
                found[f"{kind.plural}/{obj['metadata']['name']}"] = obj
    text = json.dumps(found)
    for place, obj in found.items():
        text = text.replace(obj["metadata"]["uid"], f"uid of {place}")
    return {place: _bare(obj) for place, obj in json.loads(text).items()}


_FLEETING = {
    "creationTimestamp", "resourceVersion", "lastTransitionTime", "time", "measuredAt", "clusterIP", "clusterIPs",
}  # fmt: skip


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(one) for key, one in value.items() if key not in _FLEETING}
    return [_bare(one) for one in value] if isinstance(value, list) else value


def events_of(world: World) -> set[tuple[str, str, str, str]]:
    kind = world.registry.kinds.find("", "v1", "events")
    return {
        (one["involvedObject"]["name"], one["type"], one["reason"], one["message"])
        for one in world.registry.select(kind, NAMESPACE)
    }


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        return [
            line
            for key in sorted({*expected, *found})
            for line in differences(expected.get(key), found.get(key), f"{path}.{key}")
        ]
    return [] if expected == found else [f"{path}: expected {json.dumps(expected)}, found {json.dumps(found)}"]


def check(undisturbed: End, end: End) -> list[str]:
    wrong = differences(undisturbed.objects, end.objects)
    expected, reported = (
        {event[:3] for event in one.events} for one in (undisturbed, end)
    )  # the figures are of the moment
    wrong += [f"no event {event}" for event in expected - reported]
    wrong += [f"event {event}" for event in reported - expected]
    late = [call for call in end.calls if call.writes and call.time_s > end.ended_s - QUIET_S]
    return wrong + [f"still writes: {call}" for call in late]


def impatient(end: End, at: int) -> list[str]:
    """What was asked of an API server that wanted to be left alone; Events are not waited for."""
    refused = end.calls[at]
    early = [call for call in end.calls[at + 1 :] if call.time_s < refused.time_s + RETRY_AFTER_S]
    return [] if refused.path.endswith("/events") else [f"asked too early: {call}" for call in early]


def faults_of(call: Call) -> list[Fault]:
    """For a read, a half-applied call is no more than a reset."""
    return [fault for fault in get_args(Fault) if call.writes or fault != "half-applied"]


def in_turn(call: Call, number: int) -> list[Fault]:
    others = [fault for fault in faults_of(call) if fault != "kill"]
    return ["kill", others[number % len(others)]]


async def wrongs(stage: Stage, undisturbed: End, fault: Fault, at: int) -> list[str]:
    """What came out otherwise where this call of the scenario failed in this way."""
    call = undisturbed.calls[at]
    end = await stage.play(fault, at)
    said = check(undisturbed, end) + (impatient(end, at) if fault == "429" else [])
    return [f"{fault} at {at} {call.method} {call.path}: {line}" for line in said]


@pytest.mark.slow
@pytest.mark.parametrize("every_fault", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["in turn", "every"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_whatever_goes_wrong_it_ends_as_if_nothing_had(name: str, every_fault: bool, tmp_path: Path) -> None:
    async def play_all() -> list[str]:
        async with whole_world(tmp_path) as world:
            stage = Stage(world, SCENARIOS[name])
            await stage.prepare()
            undisturbed = await stage.play()
            assert undisturbed.calls
            assert not check(undisturbed, await stage.play())
            first = list(SCENARIOS).index(name)  # so that the scenarios differ in which call meets which fault
            return [
                line
                for at, call in enumerate(undisturbed.calls)
                for fault in (faults_of(call) if every_fault else in_turn(call, first + at))
                for line in await wrongs(stage, undisturbed, fault, at)
            ]

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        wrong = runner.run(play_all())

    assert not wrong, "\n".join(wrong)
