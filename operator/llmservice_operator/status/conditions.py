"""The conditions: each verdict is a pure function of what was observed, its message says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Adapter, Manifest
from llmservice_operator.api.status import Condition
from llmservice_operator.pods.pod import (
    OOM_REMEDY,
    Pod,
    Trouble,
    counted_ready,
    denial_reason,
    observed,
    pods_denied,
    rollout_overdue,
    rollout_paused,
    serving_present,
)
from llmservice_operator.pods.pod_model import Fetching, PodAdapter
from llmservice_operator.scaling.decision import Decision
from llmservice_operator.scaling.feasibility import Feasibility
from llmservice_operator.scaling.load import Load
from llmservice_operator.sizing import GIB, Sized, SizingProblem, SizingReport

READY, PROGRESSING, STALLED, SIZING_VALID = "Ready", "Progressing", "Stalled", "SizingValid"
SCALING_ACTIVE, SLO_FEASIBLE = "ScalingActive", "SLOFeasible"
NAME_TAKEN = "NameTaken"
"""Present only where it is True, as is the next one."""
DEGRADED = "Degraded"
GATEWAY_ONLY = "GatewayOnly"
"""Present only where the gateway has API keys."""
ADAPTERS_READY = "AdaptersReady"
"""Present only where the spec lists adapters."""

INFERENCE_POOL_READY = "InferencePoolReady"
"""Present only where the spec asks for an InferencePool."""

UPDATING = "Updating"
"""Reason of a service that would be Ready, had Kubernetes already observed the present spec."""

SCALED_TO_ZERO = "ScaledToZero"
"""Reason of Ready=False at the autoscaler's zero: a request that waits is answered."""
LIMITED_BY_COST = "LimitedByCost"
"""Reason of ScalingActive=True, and of Ready=False where no replica may start until midnight."""
NO_REPLICAS = "NoReplicas"
"""Reason of Ready=True at the zero that spec.replicas asks for: no request is answered until a user raises it."""

_NO_USER_NEEDED = frozenset({"Settled", "Replacing", "ModelUnreachable"})
"""Reasons of Progressing=False after which the operator or Kubernetes goes on by itself, or is done."""
_MESSAGE_LIMIT = 2048
_PODS_NAMED = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """A condition without its times."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def conditions(
    before: Iterable[Condition], verdicts: Iterable[Verdict | Condition], generation: int, now: float
) -> list[Condition]:
    """The new list; the transition time moves only where the status flips. A condition is kept as it is."""
    past = {condition.type: condition for condition in before}
    return [
        verdict if isinstance(verdict, Condition) else _condition(past.get(verdict.type), verdict, generation, now)
        for verdict in verdicts
    ]


def _condition(past: Condition | None, verdict: Verdict, generation: int, now: float) -> Condition:
    same = past is not None and past.status == verdict.status
    return Condition(
        type=verdict.type,
        status=verdict.status,
        reason=verdict.reason,
        message=printable(verdict.message)[:_MESSAGE_LIMIT],
        last_transition_time=past.last_transition_time if past is not None and same else rfc3339(now),
        observed_generation=generation,
    )


def printable(text: str) -> str:
    """One line without control characters: a pod's last log line may be printed on a terminal."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def rfc3339(time_s: float) -> str:
    """A time as Kubernetes writes it, to the second."""
    return datetime.fromtimestamp(int(time_s), tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def sizing_verdict(sizing: Sized | SizingProblem) -> Verdict:
    if isinstance(sizing, SizingProblem):
        return Verdict(SIZING_VALID, "False", sizing.reason, sizing.message)
    if sizing.self_sized:
        return _self_sizing_verdict(sizing.report)
    plan = sizing.plan
    assert plan is not None  # noqa: S101 - what the operator sizes has a plan
    holder = "the KV cache" if plan.kv_bytes_per_token else "an encoder has no KV cache, a step"
    message = (
        f"at most {plan.max_num_seqs} sequences in a step, limited by {plan.limited_by}; {holder} holds"
        f" {plan.guaranteed_sequences} of {plan.max_model_len} tokens"
    )
    return Verdict(SIZING_VALID, "True", "Fits", message)


def _self_sizing_verdict(report: SizingReport | None) -> Verdict:
    if report is None:
        message = (
            "the model's figures can't be read before a pod runs: the server sizes itself and what it found will be"
            " shown here; spec.model.shape would tell now"
        )
        return Verdict(SIZING_VALID, "Unknown", "AwaitingPod", message)
    message = (
        f"at most {report.max_num_seqs} sequences in a step, each up to {report.max_model_len} tokens, worked out by"
        " the server"
    )
    return Verdict(SIZING_VALID, "True", "SizedByServer", message)


def ready_verdict(
    deployment: Manifest | None,
    desired: int,
    pods: Sequence[Pod],
    sizing: Sized | SizingProblem,
    blocked: Trouble | None,
    *,
    autoscaled: bool = False,
    decision: Decision | None = None,
) -> Verdict:
    """Ready means that the present spec is served by the wanted number of replicas, which may be none.

    Zero replicas are Ready where the user has set them, for there is nothing to wait for. Those of the autoscaler are
    not: a request waits until one has started. `blocked` is what kept the operator from applying the Deployment or a
    Service.
    """
    ready = sum(pod.serves for pod in pods)
    present = serving_present(deployment, pods)
    if (why := _held_up(sizing, blocked)) is not None:
        return _held_up_verdict(ready, why)
    if desired == 0:
        return _zero_verdict(decision, autoscaled=autoscaled)
    ready, troubles = min(ready, counted_ready(deployment)), _troubles(deployment, pods)
    named = "".join(f"; {one.reason}: {one.message}" for one in troubles)
    if present < min(ready, desired):
        which = f"{present} of {desired} replicas serve the present spec, {ready - present} an earlier one{named}"
        return Verdict(READY, "False", "ServingEarlierSpec" if troubles else "RollingOut", which)
    counted = f"{min(present, desired)} of {desired} replicas are ready{named}{_restarted(pods)}"
    if present < desired:
        waiting = "PartlyReady" if present else "Starting"
        return Verdict(READY, "False", troubles[0].reason if troubles else waiting, counted)
    if not observed(deployment):
        return Verdict(READY, "False", UPDATING, f"{counted}; Kubernetes has not taken up the present spec yet")
    return Verdict(READY, "True", "Serving", counted)


def _zero_verdict(decision: Decision | None, *, autoscaled: bool) -> Verdict:
    if not autoscaled:
        return Verdict(READY, "True", NO_REPLICAS, "no replica is asked for: raise spec.replicas to serve")
    if decision is not None and (capped := _capped(decision)):
        message = f"{capped}; requests are refused until midnight (UTC), or raise autoscaling.maxGPUHoursPerDay"
        return Verdict(READY, "False", LIMITED_BY_COST, message)
    message = "there is no request: the next one waits in the gateway until the replica that it starts is ready"
    return Verdict(READY, "False", SCALED_TO_ZERO, message)


def _held_up_verdict(ready: int, why: Trouble) -> Verdict:
    if not ready:
        return Verdict(READY, "False", why.reason, why.message)
    message = f"{ready} replicas serve an earlier spec; the present one is held up: {why.reason}: {why.message}"
    return Verdict(READY, "False", "ServingEarlierSpec", message)


def _restarted(pods: Iterable[Pod]) -> str:
    killed = sum(pod.serves and pod.out_of_memory for pod in pods)
    return f"; OOMKilled: {killed} of them restarted after being killed for memory: {OOM_REMEDY}" if killed else ""


def _held_up(sizing: Sized | SizingProblem, blocked: Trouble | None) -> Trouble | None:
    """Why the present spec can't be served or applied; pods of an earlier one keep running."""
    if isinstance(sizing, SizingProblem):
        return Trouble(sizing.reason, sizing.message)
    return blocked and Trouble(denial_reason(blocked.message, blocked.reason), blocked.message)


def while_fetching(ready: Verdict, fetching: Fetching | None, uri: str) -> Verdict:
    """`ready` with the download's progress, where nothing is wrong and the starting pods are downloading."""
    if fetching is None or ready.reason != "Starting":
        return ready
    message = f"{fetching.pods} pods fetch {uri}" if fetching.pods > 1 else f"1 pod fetches {uri}"
    if fetching.percent is not None and fetching.total_bytes:
        message += f": {fetching.percent} % of {fetching.total_bytes / GIB:.2f} GiB"
    return replace(ready, reason="FetchingModel", message=message)


def progressing_verdict(
    deployment: Manifest | None,
    desired: int,
    pods: Sequence[Pod],
    sizing: Sized | SizingProblem,
    blocked: Trouble | None,
) -> Verdict:
    """Progressing means that the operator or Kubernetes still works towards the spec."""
    if (why := _held_up(sizing, blocked) or rollout_overdue(deployment)) is not None:
        return Verdict(PROGRESSING, "False", why.reason, why.message)
    status: dict[str, Any] = (deployment or {}).get("status") or {}
    counts = [int(status.get(key, 0)) for key in ("updatedReplicas", "readyReplicas", "replicas")]
    if observed(deployment) and set(counts) == {desired}:
        return Verdict(PROGRESSING, "False", "Settled", f"all {desired} replicas run the present spec")
    if troubles := _troubles(deployment, pods):
        return Verdict(PROGRESSING, "True", troubles[0].reason, troubles[0].message)
    present = serving_present(deployment, pods)
    message = f"{min(present, desired)} of {desired} replicas serve the present spec"
    if present > desired:
        message += f", {present - desired} more to be removed"
    return Verdict(PROGRESSING, "True", "RollingOut", message)


def _troubles(deployment: Manifest | None, pods: Sequence[Pod]) -> list[Trouble]:
    """Each kind of trouble once: first that of pods, without terminating ones, then what keeps pods from being made."""
    found = [pod.trouble for pod in pods if not pod.terminating] + [
        pods_denied(deployment),
        rollout_overdue(deployment),
        rollout_paused(deployment),
    ]
    return list({trouble.reason: trouble for trouble in found if trouble}.values())


def stalled_verdict(ready: Verdict, progressing: Verdict) -> Verdict:
    """Stalled means that nothing more happens until a user acts, as kstatus reads it.

    https://github.com/kubernetes-sigs/cli-utils/blob/master/pkg/kstatus/README.md
    """
    moves = progressing.status == "True" or progressing.reason in _NO_USER_NEEDED
    if moves or ready.status == "True":
        return Verdict(STALLED, "False", "NotStalled", "nothing keeps the service from the present spec for good")
    return Verdict(STALLED, "True", progressing.reason, progressing.message)


def scaling_verdict(
    decision: Decision, pods: Sequence[Pod], sizing: Sized | SizingProblem, *, autoscaled: bool
) -> Verdict:
    if not autoscaled:
        return Verdict(
            SCALING_ACTIVE, "False", "FixedReplicas", "spec.replicas rules; set spec.autoscaling to change that"
        )
    if isinstance(sizing, SizingProblem):
        return Verdict(
            SCALING_ACTIVE, "False", "SizingInvalid", "replicas stay as they are until the spec can be served"
        )
    if not decision.active:
        message = "; ".join(decision.reasons)
        if any(pod.serves for pod in pods):
            return Verdict(SCALING_ACTIVE, "False", "NoMetrics", message)
        if decision.replicas == 0:
            return Verdict(SCALING_ACTIVE, "False", "NoGateway", message)
        return Verdict(SCALING_ACTIVE, "Unknown", "NoReadyPods", message)
    return _following(decision)


def _following(decision: Decision) -> Verdict:
    asks = f"the load asks for {decision.wanted} replicas, {decision.replicas} are set"
    if capped := _capped(decision):
        message = f"{capped}; raise autoscaling.maxGPUHoursPerDay for more"
        return Verdict(SCALING_ACTIVE, "True", LIMITED_BY_COST, message)
    return Verdict(SCALING_ACTIVE, "True", "FollowingLoad", f"{asks}; status.autoscaling says why")


def _capped(decision: Decision) -> str | None:
    """How the day's GPU-hours limit the replicas, where they do."""
    return next((reason for reason in decision.reasons if reason.startswith("cost: ")), None)


def name_verdict(name: str, namespace: str, holder: str | None) -> Verdict | None:
    """NameTaken, where the gateway routes the name to another namespace, `holder`."""
    if holder is None or holder == namespace:
        return None
    why = "means that namespace" if name.startswith(f"{holder}/") else "belongs to an older service there"
    message = (
        f"the gateway looks for {name} in the namespace {holder}, for the name {why}: clients reach this service as"
        f" {namespace}/{name}; or set another model.servedName"
    )
    return Verdict(NAME_TAKEN, "True", "NameTaken", message)


def access_verdict(access: Literal["gateway", "direct"]) -> Verdict:
    """GatewayOnly: whether all requests are subject to the gateway's keys."""
    if access == "gateway":
        return Verdict(
            GATEWAY_ONLY, "True", "SignedRequests", "the pods take only requests that the gateway has signed"
        )
    message = (
        "spec.access is direct: clients that reach the Service need no API key of the gateway, and the limits of its"
        " keys do not apply to them; with access gateway the pods take only what the gateway has signed"
    )
    return Verdict(GATEWAY_ONLY, "False", "DirectAccess", message)


def degraded_verdict(load: Load) -> Verdict | None:
    """Degraded, where pods serve without some of our kernels."""
    if not load.fallbacks:
        return None
    pods = [f"{name} ({', '.join(parts)})" for name, parts in sorted(load.fallbacks.items())]
    named = ", ".join(pods[:_PODS_NAMED]) + (", …" if len(pods) > _PODS_NAMED else "")
    message = (
        f"{len(pods)} of {len(load.pods)} pods compute more slowly, by PyTorch, because kernels failed their check on"
        f" that GPU: {named}. The pod's log says why; with podTemplate.extraArgs [--attention, triton] it fails"
        " instead"
    )
    return Verdict(DEGRADED, "True", "KernelFallback", message)


def adapters_verdict(listed: Sequence[Adapter], reports: Mapping[str, Sequence[PodAdapter]]) -> Verdict | None:
    """AdaptersReady: whether each pod that serves has each adapter as it is listed. `reports` by pod."""
    if not listed:
        return None
    if not reports:
        return Verdict(ADAPTERS_READY, "Unknown", "NoReadyPods", "no pod is ready that could load the adapters")
    failed = _failed_adapters(listed, reports)
    if failed:
        return Verdict(ADAPTERS_READY, "False", "AdapterLoadFailed", "; ".join(failed))
    counts = {one.name: pods_with(one, reports) for one in listed}
    if missing := [f"{name} by {count} of {len(reports)}" for name, count in counts.items() if count < len(reports)]:
        message = f"adapters are loaded by fewer pods than are ready: {', '.join(missing)}"
        return Verdict(ADAPTERS_READY, "False", "AdaptersLoading", message)
    return Verdict(ADAPTERS_READY, "True", "Loaded", f"each of {len(reports)} pods has {', '.join(counts)}")


def pods_with(adapter: Adapter, reports: Mapping[str, Sequence[PodAdapter]]) -> int:
    """How many pods have loaded it from its present URI."""
    return sum(
        any(one.name == adapter.name and one.uri == adapter.uri and one.error is None for one in report)
        for report in reports.values()
    )


def inference_pool_verdict(pool: Manifest | None, *, installed: bool) -> Verdict:
    """InferencePoolReady: whether there is one, and what the Gateways that use it say about it."""
    if not installed:
        message = (
            "the cluster does not serve InferencePools (inference.networking.k8s.io/v1): install the CRDs of the"
            " Gateway API Inference Extension, or set gateway.inferencePool to false"
        )
        return Verdict(INFERENCE_POOL_READY, "False", "CRDNotInstalled", message)
    if pool is None:
        return Verdict(INFERENCE_POOL_READY, "False", "NotApplied", "it does not exist yet; Progressing says why")
    parents = (pool.get("status") or {}).get("parents") or []
    reported = [one for parent in parents for one in parent.get("conditions") or []]
    refused = next((one for one in reported if one.get("status") == "False"), None)
    if refused is not None:
        message = f"a Gateway reports {refused['type']} False, {refused['reason']}: {refused.get('message', '')}"
        return Verdict(INFERENCE_POOL_READY, "False", "RefusedByGateway", message)
    accepted = sum(one.get("type") == "Accepted" and one.get("status") == "True" for one in reported)
    return Verdict(INFERENCE_POOL_READY, "True", "Created", f"it exists, {accepted} Gateways have accepted it")


def _failed_adapters(listed: Sequence[Adapter], reports: Mapping[str, Sequence[PodAdapter]]) -> list[str]:
    """A sentence for each."""
    found = []
    for adapter in listed:
        errors = {
            pod: one.error
            for pod, report in sorted(reports.items())
            for one in report
            if one.error is not None and (one.name, one.uri) == (adapter.name, adapter.uri)
        }
        if errors:
            pod, error = next(iter(errors.items()))
            others = f" and {len(errors) - 1} more" if len(errors) > 1 else ""
            found.append(f"{adapter.name} ({pod}{others}): {error}")
    return found


def slo_verdict(found: Feasibility) -> Verdict:
    """SLOFeasible: whether replicas can help to meet the targets of latency."""
    return Verdict(SLO_FEASIBLE, found.status, found.reason, found.message)


def remembered_slo(service: LLMService) -> Feasibility | None:
    """What the status kept about the targets, where it is about the present spec."""
    condition = service.status.condition(SLO_FEASIBLE)
    if condition is None or condition.observed_generation != service.metadata.generation:
        return None
    return Feasibility(condition.status, condition.reason, condition.message)
