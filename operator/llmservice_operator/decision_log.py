"""The last decisions, kept in the status: for people who ask why, and for a scaler that restarts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from llmservice_operator.conditions import rfc3339
from llmservice_operator.pod import epoch
from llmservice_operator.scaling import Decision, History
from llmservice_operator.status import MAX_DECISIONS, DecisionStatus

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


def resume(log: Sequence[DecisionStatus], replicas: int, now: float) -> History:
    """The scaler's memory after a restart: since when fewer are wanted than run, and when replicas were last added."""
    ups = [epoch(newer.time) for newer, older in pairwise(log) if newer.replicas > older.replicas]
    last_up_s = max(ups, default=None)
    if log and log[0].replicas == replicas and log[0].wanted < replicas:
        return History.start(now, replicas, since_s=epoch(log[0].time), last_up_s=last_up_s)
    return History.start(now, replicas, last_up_s=last_up_s)


def _direction(decision: Decision | DecisionStatus) -> int:
    return (decision.wanted > decision.replicas) - (decision.wanted < decision.replicas)
