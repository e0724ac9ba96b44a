"""The next step of a rolling update, as a pure function of the desired and the available replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scaling:
    """The desired scale of a Deployment, with surge and unavailability as numbers of pods."""

    replicas: int
    max_surge: int
    max_unavailable: int
    recreate: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaSetState:
    """One ReplicaSet: its desired, actual and available pods."""

    name: str
    wanted: int
    actual: int
    available: int


def resolve(max_surge: int | str, max_unavailable: int | str, replicas: int) -> tuple[int, int]:
    """Percentages as pods: surge is rounded up, unavailability down; if both are zero, one pod may be unavailable."""
    surge = _pods(max_surge, replicas, up=True)
    unavailable = _pods(max_unavailable, replicas, up=False)
    return (surge, unavailable) if surge or unavailable else (0, 1)


def plan_rollout(scaling: Scaling, current: str, states: Sequence[ReplicaSetState]) -> dict[str, int]:
    """The desired replicas of each ReplicaSet (oldest first); `current` is the one with the current template."""
    new = next(state for state in states if state.name == current)
    old = [state for state in states if state.name != current]
    wanted = {state.name: state.wanted for state in states}
    if scaling.paused:  # a paused rollout can only be scaled, if one ReplicaSet has all pods
        active = [state for state in states if state.wanted] or [new]
        return {**wanted, active[0].name: scaling.replicas} if len(active) == 1 else wanted
    if scaling.recreate:
        stopped = not any(state.wanted or state.actual for state in old)
        return {state.name: 0 for state in old} | {current: scaling.replicas if stopped else new.wanted}
    total = sum(wanted.values())
    if new.wanted > scaling.replicas:
        wanted[current] = scaling.replicas
    elif new.wanted < scaling.replicas:
        room = scaling.replicas + scaling.max_surge - total
        wanted[current] += max(0, min(room, scaling.replicas - new.wanted))
    wanted |= _shrink_old(scaling, ReplicaSetState(current, wanted[current], new.actual, new.available), old)
    return wanted


def _shrink_old(scaling: Scaling, new: ReplicaSetState, old: Sequence[ReplicaSetState]) -> dict[str, int]:
    """Scale the old ReplicaSets down: unhealthy pods first, then as many as availability allows."""
    least_available = scaling.replicas - scaling.max_unavailable
    wanted = {state.name: state.wanted for state in old}
    new_unavailable = max(0, new.wanted - new.available)
    spare = sum(wanted.values()) + new.wanted - least_available - new_unavailable
    for state in old:
        unhealthy = min(max(0, state.wanted - state.available), max(0, spare))
        wanted[state.name] -= unhealthy
        spare -= unhealthy
    available = new.available + sum(min(state.available, wanted[state.name]) for state in old)
    spare = available - least_available
    for state in old:
        healthy = min(wanted[state.name], max(0, spare))
        wanted[state.name] -= healthy
        spare -= healthy
    return wanted


def _pods(value: int | str, replicas: int, *, up: bool) -> int:
    if isinstance(value, int):
        return value
    share = int(value.rstrip("%")) * replicas / 100
    return math.ceil(share) if up else math.floor(share)
