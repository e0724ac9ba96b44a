"""Why a service is in its present state, as plain data: read from the API server, judged here, rendered by text.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmservice_operator.api import labels
from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.schema_model import SchemaModel
from llmservice_operator.api.spec import Manifest
from llmservice_operator.api.status import AutoscalingStatus, Condition, SizingStatus
from llmservice_operator.children.deployment import CONTAINER
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.pods.pod import epoch, pod_of
from llmservice_operator.status.conditions import READY, SCALED_TO_ZERO, printable

_EVENTS = 8
_PODS_READ = 10
"""Of how many pods the last line is read."""
_HEALTHY = {
    "Ready": ("True",),
    "Stalled": ("False",),
    "NameTaken": ("False",),
    "Degraded": ("False",),
    "AdaptersReady": ("True", "Unknown"),
    "GatewayOnly": ("True", "False"),
    "InferencePoolReady": ("True",),
    "SizingValid": ("True",),
    "SLOFeasible": ("True", "Unknown"),
}
"""What a condition may be while nothing is wrong. ScalingActive and Progressing are wrong for some reasons only."""
_WRONG = frozenset(
    {
        "NoMetrics",
        "NoGateway",
        "ProgressDeadlineExceeded",
        "DeploymentPaused",
        "NameConflict",
        "ApplyFailed",
        "AdmissionDenied",
    }
)


@dataclass(frozen=True, slots=True)
class World:
    """The service and what belongs to it, as the API server returned it."""

    service: Manifest
    deployment: Manifest | None
    pods: Sequence[Manifest]
    events: Sequence[Manifest]
    last_lines: Mapping[str, str] = field(default_factory=dict)
    """The last line of a pod's log, by pod."""


async def read_world(client: KubeClient, namespace: str, name: str) -> World | None:
    """None where there is no such service. Raises KubeError where that can't be read.

    Deployment, pods, Events and logs are left out where the user may not read them.
    """
    service = await client.get_service(namespace, name)
    if service is None:
        return None
    deployment, pods, events = await asyncio.gather(
        client.get_child(CHILD_KINDS["Deployment"], namespace, name),
        client.list_pods(namespace, labels.selector(name)),
        client.list_events(namespace, f"involvedObject.kind=LLMService,involvedObject.name={name}"),
        return_exceptions=True,
    )
    found = [] if isinstance(pods, BaseException) else pods
    lines = await asyncio.gather(*(_last_line(client, namespace, pod) for pod in found[:_PODS_READ]))
    return World(
        service=service,
        deployment=None if isinstance(deployment, BaseException) else deployment,
        pods=found,
        events=[] if isinstance(events, BaseException) else events,
        last_lines={pod["metadata"]["name"]: line for pod, line in zip(found, lines, strict=False) if line},
    )


async def _last_line(client: KubeClient, namespace: str, manifest: Manifest) -> str | None:
    """The last line of the server's log; of one that ended, the last before that."""
    pod = pod_of(manifest)
    try:
        text = await client.read_log(namespace, pod.name, CONTAINER, previous=pod.restarts > 0 and not pod.serves)
    except KubeError:  # it has not started, or the user may not read logs
        return None
    lines = text.strip().splitlines()
    return lines[-1] if lines else None


class Problem(SchemaModel):
    condition: str
    reason: str
    message: str
    since: str | None
    remedy: str | None


class Replicas(SchemaModel):
    desired: int
    ready: int
    min: int | None = None
    max: int | None = None


class PodLine(SchemaModel):
    name: str
    state: str
    """Ready, Starting, Terminating, or the reason of what keeps it from serving."""
    restarts: int
    created: str
    message: str | None
    last_line: str | None


class EventLine(SchemaModel):
    time: str
    type: str
    reason: str
    message: str
    count: int


class Explanation(SchemaModel):
    """The most urgent first."""

    namespace: str
    name: str
    model: str
    served_name: str
    healthy: bool
    headline: str
    problems: tuple[Problem, ...]
    replicas: Replicas
    ttft_target_s: float | None
    sizing: SizingStatus | None
    autoscaling: AutoscalingStatus | None
    pods: tuple[PodLine, ...]
    events: tuple[EventLine, ...]

    def document(self) -> dict[str, Any]:
        """For machines, in the CRD's own spelling."""
        document = self.model_dump(by_alias=True)
        for name, part in (("replicas", self.replicas), ("sizing", self.sizing), ("autoscaling", self.autoscaling)):
            document[name] = part and part.model_dump(by_alias=True, exclude_none=True)
        return document


def explain(world: World) -> Explanation:
    """Judge a service; raises pydantic's ValidationError for a spec of another version of the CRD."""
    service = LLMService.model_validate(world.service)
    status, spec = service.status, service.spec
    problems = tuple(_problems(service))
    scaling = spec.autoscaling
    return Explanation(
        namespace=service.namespace,
        name=service.name,
        model=spec.model.uri,
        served_name=service.served_name,
        healthy=not problems,
        headline=_headline(service, problems),
        problems=problems,
        replicas=Replicas(
            desired=_desired(service, world.deployment),
            ready=status.ready_replicas,
            min=scaling.min_replicas if scaling else None,
            max=scaling.max_replicas if scaling else None,
        ),
        ttft_target_s=spec.slo.ttft_p99_s,
        sizing=status.sizing,
        autoscaling=status.autoscaling,
        pods=tuple(_pod_line(pod, world.last_lines) for pod in world.pods),
        events=tuple(_event_lines(world.events)),
    )


def _problems(service: LLMService) -> Iterable[Problem]:
    status, present = service.status, service.metadata.generation
    if not status.conditions:
        yield _problem(service, "Ready", "NotReconciled", "no operator has looked at this service yet", None)
        return
    if status.observed_generation < present:
        message = f"the spec is at generation {present}, the operator at {status.observed_generation}"
        yield _problem(service, "Ready", "BehindSpec", message, None)
    named: list[Condition] = []
    for condition in status.conditions:
        if _wrong(condition) and not any(_repeats(condition, one) for one in named):
            named.append(condition)
            yield _problem(service, condition.type, condition.reason, condition.message, condition.last_transition_time)


def _repeats(condition: Condition, earlier: Condition) -> bool:
    """Ready's message holds that of Progressing, behind the number of replicas."""
    same_reason = condition.reason == earlier.reason
    return condition.message == earlier.message or (same_reason and condition.message in earlier.message)


def _wrong(condition: Condition) -> bool:
    if condition.type == READY and condition.reason == SCALED_TO_ZERO:
        return False
    fine = _HEALTHY.get(condition.type)
    return condition.status not in fine if fine else condition.reason in _WRONG


def _problem(service: LLMService, condition: str, reason: str, message: str, since: str | None) -> Problem:
    what_to_do = remedy(reason, service.namespace, service.name)
    return Problem(condition=condition, reason=reason, message=message, since=since, remedy=what_to_do)


def _headline(service: LLMService, problems: Sequence[Problem]) -> str:
    ready = service.status.condition("Ready")
    at_zero = ready is not None and ready.reason == SCALED_TO_ZERO
    if ready is not None and (ready.status == "True" or at_zero):
        state = "Scaled to zero" if at_zero else "Serving"
        return ready.message if not problems else f"{state}, but {problems[0].reason}"
    return f"{problems[0].reason}: {problems[0].message}" if problems else "Not Ready"


def _desired(service: LLMService, deployment: Manifest | None) -> int:
    known = service.status.autoscaling
    if known is not None:
        return known.desired_replicas
    return int(((deployment or {}).get("spec") or {}).get("replicas", service.spec.replicas))


def _pod_line(manifest: Manifest, last_lines: Mapping[str, str]) -> PodLine:
    pod = pod_of(manifest)
    state = "Ready" if pod.serves else pod.trouble.reason if pod.trouble else "Starting"
    line = last_lines.get(pod.name)
    return PodLine(
        name=pod.name,
        state="Terminating" if pod.terminating else state,
        restarts=pod.restarts,
        created=manifest["metadata"]["creationTimestamp"],
        message=printable(pod.trouble.message) if pod.trouble else None,
        last_line=printable(line) if line else None,
    )


def _event_lines(events: Sequence[Manifest]) -> Iterable[EventLine]:
    """The newest, newest first."""
    timed = [(time, event) for event in events if (time := _event_time(event))]
    for time, event in sorted(timed, key=lambda one: epoch(one[0]), reverse=True)[:_EVENTS]:
        yield EventLine(
            time=time,
            type=str(event.get("type", "")),
            reason=str(event.get("reason", "")),
            message=printable(str(event.get("message", ""))),
            count=int(event.get("count") or 1),
        )


def _event_time(event: Manifest) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


def remedy(reason: str, namespace: str, name: str) -> str | None:
    """Where to look and what to change for a condition's reason; None where nothing is wrong, or the message says it.

    The condition's message says what happened in this case.
    """
    text = _REMEDIES.get(reason)
    if text is None:
        return None
    about = {"namespace": namespace, "name": name}
    return text.format(**about, pods=_PODS.format(**about), logs=_LOGS.format(**about))


_PODS = "kubectl describe pods -n {namespace} -l app.kubernetes.io/instance={name}"
_LOGS = "kubectl logs -n {namespace} deploy/{name} --previous"

_REMEDIES = {
    # the service is on its way
    "Starting": "Wait: pods load the model. If it takes much longer than before, look at {pods}",
    "FetchingModel": "Wait: the pods download the checkpoint; status.model.fetch says how far they are.",
    "PartlyReady": "Wait: some replicas still load the model. They count as soon as /ready answers.",
    "RollingOut": "Wait: the new pods load the model; what ran before serves meanwhile.",
    "Updating": "Wait a moment; if it stays so, the cluster's deployment controller is not working.",
    "Replacing": "Wait: the objects of the deleted service of that name are being removed.",
    "ScaledToZero": "Send a request to the gateway: it waits there until the replica that it starts is ready.",
    "NoReplicas": "Raise it: kubectl scale llm {name} -n {namespace} --replicas=1",
    "NotReconciled": "See that the operator runs and follows this namespace:"
    " kubectl get pods -A -l app.kubernetes.io/component=operator",
    "BehindSpec": "Wait a moment; if it stays so, see the operator's log.",
    # pods
    "Unschedulable": "Free or add a node with such a GPU, or ask for less in spec.resources and spec.scheduling."
    " Details: {pods}",
    "ImagePullBackOff": "Check the operator's --server-image and spec.podTemplate.imagePullSecrets. Details: {pods}",
    "OOMKilled": "Raise spec.resources.limits.memory and requests.memory, or lower spec.engine.maxModelLen.",
    "Killed": "See who killed it: {pods}, and the node's log. Memory is the usual reason.",
    "EngineFailed": "Read the log of the pod that ended, and report what you find: {logs}",
    "CrashLoopBackOff": "Read the log of the pod that ended: {logs}",
    "ModelLoadFailed": "Correct what the server names, in the checkpoint or in spec.engine. Its log: {logs}",
    "ModelFetchFailed": "Check spec.model.uri, spec.model.secretRef and the pods' way to the source"
    " (a proxy belongs into spec.networkPolicy.to):"
    " kubectl logs -n {namespace} deploy/{name} -c fetch",
    "CreateContainerConfigError": "Create the Secret or ConfigMap that is named, or correct the reference in the spec.",
    "CreateContainerError": "The node can't make the container: {pods}",
    "RunContainerError": "The node can't start the container: {pods}",
    "QuotaExceeded": "Raise the namespace's ResourceQuota, or ask for less: kubectl describe quota -n {namespace}",
    "AdmissionDenied": "Ask the owner of the policy that is named, or change what it objects to in the spec.",
    "FailedCreate": "Correct what the API server objects to. A limit that is not in the spec comes from a LimitRange:"
    " kubectl describe limitrange -n {namespace}",
    "ProgressDeadlineExceeded": "The new pods never became ready. Undo the last change of the spec, or look at {pods}",
    "DeploymentPaused": "Resume it: kubectl rollout resume deployment/{name} -n {namespace}",
    # children
    "NameConflict": "Rename this service, or delete the object that has its name.",
    "SecretNotAllowed": "Annotate the Namespace as the message says, or leave the Secret out: docs/security.md",
    "EnvNotAllowed": "Leave the variable out, or have it added to the chart's operator.allowedEnv.",
    "NameTaken": "Use the name with the namespace before it, or set another spec.model.servedName.",
    "KernelFallback": "Read the warning in the pod's log, and report it; podTemplate.extraArgs [--attention,"
    " triton] makes such a pod fail instead: {logs}",
    "AdapterLoadFailed": "Correct the adapter or spec.adapters as the message says; pods try again every minute.",
    "AdaptersLoading": "Wait: the kubelet hands the list on within about a minute, then the pods fetch the adapters.",
    "CRDNotInstalled": "kubectl apply the manifests of the Gateway API Inference Extension, or set"
    " spec.gateway.inferencePool to false.",
    "NotApplied": "Wait a moment; if it stays so, see the condition Progressing.",
    "RefusedByGateway": "Correct what the Gateway names: kubectl describe inferencepool {name} -n {namespace}. The"
    " picker's Service is spec.gateway.endpointPicker.",
    "ApplyFailed": "Correct what the API server objects to; for a missing permission see the operator's role.",
    "ServingEarlierSpec": "Correct the spec; what ran before goes on serving meanwhile.",
    # sizing
    "InvalidSpec": "Correct the fields that are named; kubectl explain llmservice.spec describes each.",
    "DoesNotFit": "Take one of the remedies that are named, or compare GPUs: llmservice plan --help",
    "UnknownGPU": "Correct spec.resources.gpu.product: llmservice plan --list-gpus shows those known.",
    "InvalidSizing": "Correct the figure that is named in spec.engine.",
    "Unsupported": "Change the field that is named; the server can't do that yet.",
    "UnsupportedModel": "Choose a model of a family that is named.",
    # model source
    "InvalidURI": "Correct spec.model.uri.",
    "FileModelsDisabled": "Use hf:// or pvc://, or set the chart's operator.fileModelsRoot.",
    "ModelNotFound": "Correct spec.model.uri, or put the model there.",
    "ModelForbidden": "Name the Secret with the hub's token in spec.model.secretRef.",
    "ModelUnreachable": "Check the operator's network, or give the model's figures in spec.model.shape.",
    "ModelUnreadable": "Correct the checkpoint's config.json, or choose another revision.",
    "AwaitingPod": "Wait for the first pod, or give the figures of the model's config.json in spec.model.shape.",
    "ImageVolumesUnsupported": "Turn the feature on in the cluster, or serve the model from hf://, s3:// or pvc://.",
    # scaling and targets
    "NoMetrics": "Replicas are held. See that the operator reaches the pods' port 8001, or the Prometheus of the"
    " chart's operator.prometheusUrl (its log says which fails).",
    "NoGateway": "No request can start a replica. See that gateways run in the operator's namespace with the label"
    " app.kubernetes.io/component=gateway, and that the operator reaches their port metrics.",
    "NoReadyPods": "Replicas are held until a pod is ready.",
    "SizingInvalid": "Correct the spec first.",
    "ITLUnreachable": "Raise spec.slo.itlP99, or choose a faster GPU or a smaller model.",
    "LimitedByCost": "Raise spec.autoscaling.maxGPUHoursPerDay, or accept slower answers, and none"
    " without a replica, until midnight (UTC).",
    "PromptsTooLong": "Raise spec.slo.ttftP99, bound prompts by spec.engine.maxModelLen, or choose a faster GPU or"
    " a smaller model.",
    "UnloadedRequestMissesTarget": "Raise spec.slo.ttftP99, shorten prompts, or choose a faster GPU or"
    " a smaller model.",
}
