"""One pass over one service: observe → size → decide replicas → apply the children → write the status."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from llmservice_operator.api import duration, labels
from llmservice_operator.api.resource import KIND, LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.api.status import LLMServiceStatus
from llmservice_operator.apply.applier import Applier, Refusal, owned_by
from llmservice_operator.apply.standing import Inputs, Standing
from llmservice_operator.children.children import expected_children
from llmservice_operator.children.network_policy import DEFAULT_PEERS, PlatformPeers
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.grants import Grants
from llmservice_operator.memory import Memory, remembered_promise
from llmservice_operator.monitoring.metrics import OperatorMetrics
from llmservice_operator.observation import Observation, parsed
from llmservice_operator.pods.image_volume import image_volume_trouble
from llmservice_operator.pods.pod import Trouble, pods_of
from llmservice_operator.pods.pod_model import PodModels
from llmservice_operator.replicas import decide_replicas, scale_policy
from llmservice_operator.scaling.feasibility import assess
from llmservice_operator.scaling.scaling import Decision
from llmservice_operator.scaling.startup import StartupTimes
from llmservice_operator.signals.load import Load
from llmservice_operator.signals.signals import Signals
from llmservice_operator.sizing.sizer import ReadModel, Sizer
from llmservice_operator.sizing.sizing import Sized, SizingProblem
from llmservice_operator.status.event_recorder import EventRecorder
from llmservice_operator.status.events import scaled_event, transition_events
from llmservice_operator.status.invalid_spec import InvalidSpecError, invalid_spec_patch
from llmservice_operator.status.merge_patch import merge_patch
from llmservice_operator.status.model_status import known_figures, remembered_report
from llmservice_operator.status.note_times import NoteTimes
from llmservice_operator.status.report import Outcome, expected_status


@dataclass(slots=True)
class Reconciler:
    """The operator's hands; what is done is decided by the pure functions that it calls."""

    client: KubeClient
    cache: ObjectCache
    applier: Applier
    read_model: ReadModel
    signals: Signals
    pod_models: PodModels
    metrics: OperatorMetrics
    server_image: str
    grants: Grants
    clock: Callable[[], float] = time.time
    peers: PlatformPeers = DEFAULT_PEERS
    """Who may reach every service's pods, as NetworkPolicyPeers."""
    monotonic: Callable[[], float] = time.monotonic
    _memories: dict[tuple[str, str, str], Memory] = field(default_factory=dict)
    _events: EventRecorder = field(init=False)
    _standing: Standing = field(init=False)

    def __post_init__(self) -> None:
        self._events = EventRecorder(self.client)
        self._standing = Standing(self.cache)

    async def run_pass(self, namespace: str, name: str) -> bool:
        """Bring one service to where it should be; False once it is gone. Raises KubeError."""
        try:
            seen = self._observe(namespace, name)
        except InvalidSpecError as error:
            await self._tell_invalid(namespace, name, error)
            return True
        if seen is None:
            self.forget(namespace, name)
            return False
        memory = self._memory(seen)
        memory.startup.observe(seen.pods, seen.now, seen.steady_s)
        sizing = await self._size(seen, memory)
        load = await self._load(seen, sizing)
        fetching = await self.pod_models.fetching(seen.pods)
        self._judge_promise(seen, memory, load, sizing)
        decision = decide_replicas(seen, memory, load, sizing)
        self._measure(seen, memory, sizing, decision)
        refusals = await self._apply(seen, load, sizing, decision)
        seen = replace(seen, asked=self._deployment(seen.service))
        held = isinstance(sizing, SizingProblem) or any(one.kind == "Deployment" for one in refusals)
        outcome = Outcome(
            sizing=sizing,
            load=load,
            decision=decision,
            desired=seen.current if held else decision.replicas,
            feasibility=memory.feasibility,
            startup_s=memory.startup.p90_s,
            blocked=_blocked(refusals),
            unreachable=any(one.kind in {"Deployment", "Service"} for one in refusals),
            policy=scale_policy(seen.service, sizing),
            drain=memory.history.shifted(seen.now - seen.steady_s).drain if memory.history else None,
            fetching=fetching,
            settling=memory.settling(seen.asked, seen.steady_s),
            name_holder=self.cache.name_holder(seen.service.served_name),
            noting=memory.notes.noting(seen.steady_s, seen.window_s),
        )
        await self._write_status(seen, outcome)
        return True

    async def _tell_invalid(self, namespace: str, name: str, error: InvalidSpecError) -> None:
        if patch := invalid_spec_patch(error, self.clock()):
            self.cache.put(KIND, await self.client.patch_status(namespace, name, patch))

    def forget(self, namespace: str, name: str) -> None:
        """Drop what is remembered of a service that is gone."""
        for key in [key for key in self._memories if key[:2] == (namespace, name)]:
            del self._memories[key]
        self.applier.forget(namespace, name)
        self._standing.forget((namespace, name))
        self._events.forget(namespace, name)
        self.metrics.forget(namespace, name)

    def _observe(self, namespace: str, name: str) -> Observation | None:
        """From the cache: a pass that finds all well asks the API server for nothing."""
        manifest = self.cache.service(namespace, name)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            return None
        service = parsed(manifest)
        deployment = self._deployment(service)
        pods = pods_of(self.cache.pods(namespace, name))
        status, now, steady_s = manifest.get("status") or {}, self.clock(), self.monotonic()
        return Observation(service, status, deployment, pods, now, deployment, steady_s)

    def _deployment(self, service: LLMService) -> Manifest | None:
        """The service's own Deployment as it is by now."""
        deployment = self.cache.child("Deployment", *service.key)
        return deployment if deployment is not None and owned_by(deployment, service.metadata.uid) else None

    def _memory(self, seen: Observation) -> Memory:
        """By uid, so that a service that is created anew under an old name starts afresh."""
        key = (*seen.service.key, seen.service.metadata.uid)
        if key not in self._memories:
            known = seen.service.status.autoscaling
            startup = StartupTimes(known.startup_seconds if known else None)
            notes = NoteTimes(seen.steady_s, resumed=known is not None)
            promise = remembered_promise(seen.service)
            self._memories[key] = Memory(Sizer(self.read_model), startup, notes, feasibility=promise)
        return self._memories[key]

    async def _size(self, seen: Observation, memory: Memory) -> Sized | SizingProblem:
        """By what the status knows of the model; a server that sized itself is asked how."""
        spec = seen.service.spec
        known = known_figures(seen.service.status.model, spec.model)
        report = None
        if known is not None and known.source == "pod":
            told = await self.pod_models.report(seen.pods, spec.model.identity)
            report = told or remembered_report(seen.service.status.sizing, known, spec.engine.block_size)
        return await memory.sizer.size(spec, seen.now, known, report)

    async def _load(self, seen: Observation, sizing: Sized | SizingProblem) -> Load | None:
        if not seen.serving or (isinstance(sizing, Sized) and sizing.max_num_seqs is None):
            return None  # what a pod holds means nothing while it is not known what it can hold
        autoscaling = seen.service.spec.autoscaling
        source = autoscaling.metrics.source if autoscaling else "auto"
        return await self.signals.load(source, seen.service.namespace, seen.serving, seen.window_s, seen.now)

    def _judge_promise(
        self, seen: Observation, memory: Memory, load: Load | None, sizing: Sized | SizingProblem
    ) -> None:
        target = seen.service.spec.slo.ttft_p99
        memory.feasibility = assess(
            load,
            duration.seconds(target) if target else None,
            itl_feasible=sizing.plan.itl_feasible if isinstance(sizing, Sized) and sizing.plan else None,
            before=memory.feasibility,
        )

    def _measure(self, seen: Observation, memory: Memory, sizing: Sized | SizingProblem, decision: Decision) -> None:
        """What the metrics tell of a decision; without an autoscaler there is none to tell of."""
        self.metrics.sized(*seen.service.key, sizing.reason if isinstance(sizing, SizingProblem) else None)
        if seen.service.spec.autoscaling is None:
            return
        self.metrics.decided(seen.current, decision.replicas, decision.reasons)
        wanted = decision.wanted if decision.active else 0
        lasted_s = memory.overload.observe(wanted, len(seen.serving), seen.steady_s)
        if lasted_s is not None:
            self.metrics.relieved(lasted_s)

    async def _apply(
        self, seen: Observation, load: Load | None, sizing: Sized | SizingProblem, decision: Decision
    ) -> list[Refusal]:
        """Make the children what they should be; what can't be done comes back with the reason."""
        if isinstance(sizing, SizingProblem):
            return []
        if (refused := await self.grants.refusal(seen.service)) is not None:
            return [Refusal("Deployment", refused)]
        if decision.replicas < seen.current and load is not None:
            await self._mark_cheapest(seen, load)
        refusals = await self._apply_children(seen.service, sizing, decision.replicas)
        dropped = image_volume_trouble(sizing.model.location, seen.deployment)
        return refusals if dropped is None else [*refusals, Refusal("Deployment", dropped)]

    async def _apply_children(self, service: LLMService, sized: Sized, replicas: int) -> list[Refusal]:
        metadata = service.metadata
        inputs = Inputs(metadata.uid, metadata.generation, sized, replicas)
        if self._standing.holds(service.key, inputs):
            return []
        children = expected_children(service, sized, replicas, self.server_image, self.peers)
        refusals = await self.applier.apply(children, metadata.uid, metadata.generation)
        if refusals:
            self._standing.forget(service.key)
        else:
            self._standing.note(service.key, inputs, children)
        return refusals

    async def _mark_cheapest(self, seen: Observation, load: Load) -> None:
        """Tell Kubernetes which pods hold least work: it removes those with the lowest cost first."""
        in_flight = {pod.name: pod.in_flight for pod in load.pods}
        for pod in seen.serving:
            cost = str(round(in_flight.get(pod.name, 0)))
            if pod.deletion_cost != cost:
                answer = await self.client.annotate_pod(seen.service.namespace, pod.name, {labels.DELETION_COST: cost})
                if answer is not None:
                    self.cache.put("Pod", answer)

    async def _write_status(self, seen: Observation, outcome: Outcome) -> None:
        service = seen.service
        status = expected_status(service, seen.asked, seen.pods, outcome, seen.now)
        patch = merge_patch(seen.raw_status, status.model_dump(by_alias=True, exclude_none=True))
        self.metrics.observed(
            *service.key,
            outcome.desired,
            len(seen.serving),
            {condition.type: condition.status for condition in status.conditions},
        )
        target = service.spec.slo.ttft_p99
        self.metrics.promised(*service.key, duration.seconds(target) if target else None)
        measured = status.sizing.measured if status.sizing else None
        self.metrics.predicted(*service.key, measured.error_percent if measured else None)
        # Before the status: what it tells of already is no news to the next pass, should this one end in between.
        await self._events.post(*service.key, self._news(seen, outcome, status) if patch else (), seen.now)
        if not patch:
            return
        try:
            self.cache.put(KIND, await self.client.patch_status(*service.key, patch))
        except KubeError as error:
            if error.status != 404:  # else deleted meanwhile: the next pass will see it
                raise

    def _news(self, seen: Observation, outcome: Outcome, status: LLMServiceStatus) -> list[Manifest]:
        """What changed since the status was last written, however many passes have failed since then."""
        service, told = seen.service, seen.service.status.autoscaling
        events = transition_events(service, status, seen.now)
        before = told.desired_replicas if told else outcome.desired
        if seen.deployment is not None and seen.current != outcome.desired:
            before = seen.current
        if before != outcome.desired:
            events.append(scaled_event(service, before, outcome.desired, outcome.decision.reasons, seen.now))
        return events


def _blocked(refusals: Sequence[Refusal]) -> Trouble | None:
    """What is in the way, all of it, under the first one's reason."""
    if not refusals:
        return None
    return Trouble(refusals[0].trouble.reason, "; ".join(one.trouble.message for one in refusals))
