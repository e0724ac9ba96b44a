"""How many replicas a service is to have: the scaler's decision, where there is an autoscaler and a size."""

from __future__ import annotations

from llmservice_operator.api.resource import LLMService
from llmservice_operator.memory import Memory
from llmservice_operator.observation import Observation
from llmservice_operator.pods.pod import Pod
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.scaling import Decision, ScalePolicy, Supply, decide
from llmservice_operator.scaling.startup import StartupTimes
from llmservice_operator.signals.load import Load
from llmservice_operator.sizing.sizing import Sized, SizingProblem
from llmservice_operator.status.decision_log import resume
from llmservice_operator.status.denial import pods_denied


def decide_replicas(seen: Observation, memory: Memory, load: Load | None, sizing: Sized | SizingProblem) -> Decision:
    """The Deployment's replicas from now on, with the reasons; the memory's history goes on from here."""
    spec = seen.service.spec
    if isinstance(sizing, SizingProblem):
        return Decision(seen.current, seen.current, (f"sizing: {sizing.reason}, replicas stay",), active=False)
    if spec.autoscaling is None:
        memory.history = None
        return Decision(spec.replicas, spec.replicas, (f"spec.replicas is {spec.replicas}",))
    policy = ScalePolicy.of(spec.autoscaling, spec.slo, sizing.max_num_seqs or 1)
    history = _scaling_memory(seen, memory)
    feasible = memory.feasibility is None or memory.feasibility.status != "False"
    decision, memory.history = decide(
        load, _supply(seen, memory.startup), policy, history, seen.steady_s, feasible=feasible
    )
    return decision


def scale_policy(service: LLMService, sizing: Sized | SizingProblem) -> ScalePolicy | None:
    """What a built-in autoscaler keeps to; None where there is none, or nothing that it could scale."""
    autoscaling = service.spec.autoscaling
    if autoscaling is None or isinstance(sizing, SizingProblem):
        return None
    return ScalePolicy.of(autoscaling, service.spec.slo, sizing.max_num_seqs or 1)


def _scaling_memory(seen: Observation, memory: Memory) -> History:
    """What the scaler remembers; after a restart, what the status kept of it."""
    status, generation = seen.service.status, seen.service.metadata.generation
    history = memory.history
    if history is None:
        history = resume(status.autoscaling, seen.current, seen.now).shifted(seen.steady_s - seen.now)
        memory.generation = status.observed_generation
    if memory.generation != generation:
        memory.generation = generation
        history = history.forget_capacity()
    return history


def _supply(seen: Observation, startup: StartupTimes) -> Supply:
    """Pods on their way count for the time that one takes to start; those that no node has room for keep counting."""
    coming = [pod for pod in seen.pods if not pod.ready and not pod.terminating]
    overdue = [pod for pod in coming if startup.overdue(pod) and not _unschedulable(pod)]
    denied = pods_denied(seen.deployment)
    return Supply(
        replicas=seen.current,
        ready=len(seen.serving),
        starting=len(coming) - len(overdue),
        overdue=len(overdue),
        lead_s=startup.lead_s(coming),
        trouble=denied.reason if denied else next((reason for pod in coming if (reason := _trouble(pod))), None),
    )


_OF_ONE_POD = frozenset({"Killed", "EngineFailed", "OOMKilled"})
"""What may happen to a single pod while it serves, and under an overload is a reason to add others."""
_A_LOOP = 2
"""Restarts from which on it is no accident."""


def _unschedulable(pod: Pod) -> bool:
    return pod.trouble is not None and pod.trouble.reason == "Unschedulable"


def _trouble(pod: Pod) -> str | None:
    """What another pod of the same template would most likely meet as well."""
    if pod.trouble is None or _unschedulable(pod):
        return None
    once = pod.trouble.reason in _OF_ONE_POD and pod.restarts < _A_LOOP
    return None if once else pod.trouble.reason
