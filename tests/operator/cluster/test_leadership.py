"""Leader election: the table of a candidate's actions, and random histories in which no two processes write at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.cluster.leadership import Candidate, Election, LeadershipLostError, Lease, Timing, lease_of

TIMING = Timing(duration_s=10.0, renew_deadline_s=7.0, renew_s=2.0, retry_s=0.5)
ME, OTHER = "me", "other"


def lease(holder: str, version: str = "1", duration_s: float = 10.0) -> Lease:
    return Lease(holder, duration_s, version)


WAITING = Candidate(ME, TIMING)
LEADING = WAITING.wrote(lease(ME), 100.0)


@pytest.mark.parametrize(
    ("candidate", "now_s", "action"),
    [
        (WAITING.saw(None, 0.0), 0.0, "create"),
        (WAITING.saw(lease(""), 0.0), 0.0, "take"),
        (WAITING.saw(lease(OTHER), 0.0), 10.0, "wait"),
        (WAITING.saw(lease(OTHER), 0.0), 10.1, "take"),
        (WAITING.saw(lease(OTHER, duration_s=60.0), 0.0), 59.0, "wait"),  # its own word where it is longer than ours
        (WAITING.saw(lease(OTHER, duration_s=1.0), 0.0), 5.0, "wait"),  # and ours where it is not
        (WAITING.saw(lease(OTHER), 0.0).saw(lease(OTHER, "2"), 9.0), 15.0, "wait"),  # renewed meanwhile
        (WAITING.saw(lease(OTHER), 0.0).saw(lease(OTHER), 9.0), 11.0, "take"),  # seen again, and not renewed
        (WAITING.saw(lease(ME), 0.0), 0.0, "renew"),
        (LEADING, 101.0, "renew"),
        (LEADING, 106.9, "renew"),
        (LEADING, 107.0, "lost"),
        (LEADING.saw(None, 101.0), 101.0, "lost"),
        (LEADING.saw(lease(OTHER, "2"), 101.0), 101.0, "lost"),
        (LEADING.saw(lease("", "2"), 101.0), 101.0, "lost"),
    ],
)
def test_what_a_candidate_does_next(candidate: Candidate, now_s: float, action: str) -> None:
    step = candidate.step(now_s)

    assert step.action == action
    assert step.reason


def test_a_leader_and_a_standby_at_rest_send_at_most_sixty_requests_a_minute() -> None:
    timing = Timing()

    assert 60 / timing.renew_s + 60 / timing.retry_s <= 60
    assert timing.duration_s + timing.retry_s <= 20, "after a crash"


def test_the_leader_stops_writing_before_another_may_start() -> None:
    assert LEADING.left_s(100.0) == 7.0
    assert LEADING.left_s(107.0) <= 0
    assert WAITING.left_s(0.0) <= 0


@pytest.mark.parametrize(
    "timing", [{"renew_deadline_s": 15.0}, {"renew_s": 11.0}, {"retry_s": 4.0}, {"duration_s": 9.0}]
)
def test_timings_that_allow_two_writers_are_refused(timing: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="two could write at once"):
        Timing(**timing)


def test_a_lease_is_read_as_the_api_server_writes_it() -> None:
    spec = {"holderIdentity": "pod-1", "leaseDurationSeconds": 15, "leaseTransitions": 3}
    manifest = {"metadata": {"name": "x", "resourceVersion": "7"}, "spec": spec}

    assert lease_of(manifest) == Lease("pod-1", 15.0, "7", 3)
    assert lease_of({"metadata": {"name": "x"}}) == Lease("", 0.0, "", 0)


# -- histories -----------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """The one lease: a write that names another version than the present one is refused."""

    lease: Lease | None = None
    version: int = 0

    def write(self, new: Lease, expected: str | None) -> Lease | None:
        if (self.lease.version if self.lease else None) != expected:
            return None
        self.version += 1
        self.lease = replace(new, version=str(self.version))
        return self.lease


@dataclass
class Process:
    """A candidate on a machine whose clock is off, and goes faster or slower than time does."""

    candidate: Candidate
    offset_s: float
    rate: float
    restarts: int = 0

    def clock(self, now_s: float) -> float:
        return self.offset_s + self.rate * now_s

    def restart(self) -> None:
        """With a new identity: a new process does not inherit the lease."""
        self.restarts += 1
        self.candidate = Candidate(f"{self.candidate.identity}'", TIMING)

    def writes(self, now_s: float) -> bool:
        """Whether the fence would let a write pass at this moment."""
        return self.candidate.left_s(self.clock(now_s)) > 0


@dataclass(frozen=True)
class Turn:
    """One process reads, decides and writes; every step takes time, and the write or its answer may get lost."""

    who: int
    wait_s: float
    reading_s: float
    thinking_s: float
    fate: str  # "ok", "request lost", "answer lost", "crashes", "released"
    delay_s: float


def turn() -> st.SearchStrategy[Turn]:
    """Mostly without faults, since a lease that is never held for long would test nothing."""
    pause = st.sampled_from([0.01] * 30 + [0.4, 2.0, 5.0, 12.0, 30.0])
    fates = st.sampled_from(["ok"] * 16 + ["request lost", "answer lost", "crashes", "released"])
    return st.builds(Turn, st.integers(0, 2), st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0]), pause, pause, fates, pause)


@dataclass
class Write:
    """On its way to the server."""

    process: Process
    lease: Lease
    expected: str | None
    arrives_s: float
    sent_s: float
    answered: bool


class World:
    """Advances time in small steps; in each of them at most one process may write."""

    def __init__(self, processes: list[Process]) -> None:
        self.server, self.processes, self.now_s = Server(), processes, 0.0
        self.busy_until_s = dict.fromkeys(range(len(processes)), 0.0)
        self.writes: list[Write] = []

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        for write in sorted(self.writes, key=lambda one: one.arrives_s):
            if write.arrives_s <= end_s:
                self.check(write.arrives_s)
                self.writes.remove(write)
                self.deliver(write)
                self.check(write.arrives_s)
        self.check(end_s)
        self.now_s = end_s

    def deliver(self, write: Write) -> None:
        written = self.server.write(write.lease, write.expected)
        if written is not None and write.answered and written.holder == write.process.candidate.identity:
            write.process.candidate = write.process.candidate.wrote(written, write.sent_s)

    def check(self, now_s: float) -> None:
        writers = [process.candidate.identity for process in self.processes if process.writes(now_s)]
        assert len(writers) <= 1, f"at {now_s}: {writers}"

    def take(self, turn: Turn) -> None:
        who = turn.who % len(self.processes)
        process = self.processes[who]
        self.pass_time(turn.wait_s)
        if self.busy_until_s[who] > self.now_s:
            return
        read = self.server.lease  # the answer is on its way while others go on
        began_s = self.now_s
        candidate = process.candidate.saw(read, process.clock(began_s + turn.reading_s))
        step = candidate.step(process.clock(began_s + turn.reading_s))
        process.candidate = candidate
        self.busy_until_s[who] = began_s + turn.reading_s + turn.thinking_s + turn.delay_s
        if step.action == "lost" or turn.fate == "crashes":
            process.restart()
        elif step.action != "wait" and turn.fate != "request lost":
            sent_s = process.clock(began_s + turn.reading_s + turn.thinking_s)
            holder = "" if turn.fate == "released" and step.action == "renew" else candidate.identity
            if not holder:  # no write is allowed any more before the lease is given back
                process.candidate = Candidate(candidate.identity, TIMING)
            new = Lease(holder, TIMING.duration_s, "")
            expected = read.version if read else None
            answered = turn.fate == "ok" and bool(holder)
            self.writes.append(Write(process, new, expected, self.busy_until_s[who], sent_s, answered))


@settings(max_examples=300, deadline=None)
@given(
    offsets=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=3),
    rates=st.lists(st.floats(0.9, 1.1), min_size=3, max_size=3),
    turns=st.lists(turn(), min_size=20, max_size=120),
)
@pytest.mark.slow
def test_two_processes_never_write_at_once(offsets: list[float], rates: list[float], turns: list[Turn]) -> None:
    processes = [
        Process(Candidate(f"process-{number}", TIMING), offset_s, rates[number])
        for number, offset_s in enumerate(offsets)
    ]
    world = World(processes)
    for one in turns:
        world.take(one)
    world.pass_time(60.0)


async def test_a_process_that_lost_its_lease_does_not_give_it_back_for_the_new_holder(kube: KubeClient) -> None:
    """Someone edited the lease before it ended."""
    election = Election(
        kube, "team-a", "operator", Timing(duration_s=60.0, renew_deadline_s=50.0, renew_s=0.1, retry_s=0.1)
    )
    await election.acquire()
    path = "/apis/coordination.k8s.io/v1/namespaces/team-a/leases/operator"
    await kube.request("PATCH", path, body={"spec": {"holderIdentity": OTHER}})
    with pytest.raises(LeadershipLostError, match=OTHER):
        await election.hold()

    await election.release()

    assert lease_of(await kube.request("GET", path)).holder == OTHER


def test_the_lease_of_a_dead_process_is_taken_in_time() -> None:
    world = World([Process(Candidate("a", TIMING), 0.0, 1.0), Process(Candidate("b", TIMING), 500.0, 1.0)])
    world.take(Turn(0, 0.0, 0.01, 0.0, "ok", 0.01))
    world.pass_time(0.1)
    assert world.processes[0].writes(world.now_s)
    died_s = world.now_s
    while not world.processes[1].writes(world.now_s):
        world.take(Turn(1, TIMING.retry_s, 0.01, 0.0, "ok", 0.01))
        assert world.now_s < died_s + 15.0
