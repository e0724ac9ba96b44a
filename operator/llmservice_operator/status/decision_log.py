"""The last decisions, kept in the status: for people who ask why, and for a scaler that restarts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from llmservice_operator.api.status import MAX_DECISIONS, AutoscalingStatus, DecisionStatus
from llmservice_operator.pods.pod import epoch
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.scaling import Decision
from llmservice_operator.status.conditions import rfc3339

_REASONS = 16


def log_decision(log: Sequence[DecisionStatus], decision: Decision, now: float) -> list[DecisionStatus]:
    """Newest first. A decision is news where it changes the replicas, or begins or ends a wait for fewer or more."""
    newest = log[0] if log else None
    if newest and newest.replicas == decision.replicas and _direction(newest) == _direction(decision):
        return list(log)
    entry = DecisionStatus(
        time=rfc3339(now),
        wanted=decision.wanted,
        replicas=decision.replicas,
        reasons=list(decision.reasons[:_REASONS]),
    )
    return [entry, *log][:MAX_DECISIONS]


def resume(kept: AutoscalingStatus | None, replicas: int, now: float) -> History:
    """The scaler's memory after a restart: since when fewer are wanted than run, when replicas were changed, and what
    one replica was measured to finish."""
    if kept is None:
        return History.start(now, replicas)
    log = kept.decisions
    steps = [(epoch(newer.time), newer.replicas - older.replicas) for newer, older in pairwise(log)]
    changes = tuple((min(now, when), more) for when, more in reversed(steps) if more)
    waits = bool(log) and log[0].wanted < log[0].replicas == replicas
    history = History.start(now, replicas, since_s=min(now, epoch(log[0].time)) if waits else None, changes=changes)
    if kept.capacity is None:
        return history
    return replace(history, drain=(epoch(kept.capacity.measured_at), kept.capacity.requests_per_second))


def _direction(decision: Decision | DecisionStatus) -> int:
    return (decision.wanted > decision.replicas) - (decision.wanted < decision.replicas)
