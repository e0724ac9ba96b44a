"""One pass over one service: observe → size → decide replicas → apply the children → write the status."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from llmservice_operator.api import labels, units
from llmservice_operator.api.kinds import Child
from llmservice_operator.api.resource import KIND, LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.api.status import LLMServiceStatus
from llmservice_operator.children.deployment import template_of
from llmservice_operator.children.expected import expected_children
from llmservice_operator.children.network_policy import DEFAULT_PEERS, PlatformPeers
from llmservice_operator.cluster.applier import Applier, Refusal, owned_by
from llmservice_operator.cluster.drift import ChildInputs, InSyncCache
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.correction import as_given, corrected, given_of
from llmservice_operator.grants import Grants
from llmservice_operator.monitoring.metrics import OperatorMetrics
from llmservice_operator.pods.cold_start import ColdStart, cold_start, first_ready, woken_since
from llmservice_operator.pods.pod import Pod, Trouble, image_volume_trouble, observed, pods_of
from llmservice_operator.pods.pod_model import PodModels
from llmservice_operator.scaling.decision import Decision, ScalingState, decide_replicas
from llmservice_operator.scaling.feasibility import Feasibility, feasibility_of
from llmservice_operator.scaling.forecast import Forecast
from llmservice_operator.scaling.load import Held, Load
from llmservice_operator.scaling.supply import OverloadTimer, StartupTimes, supply_of
from llmservice_operator.signals.held import HeldRequests
from llmservice_operator.signals.sources import Signals
from llmservice_operator.sizing import ReadModel, Sized, Sizer, SizingProblem
from llmservice_operator.status.autoscaling_status import StatusWriteThrottle
from llmservice_operator.status.conditions import remembered_slo, slo_verdict
from llmservice_operator.status.events import EventRecorder, scaled_event, transition_events
from llmservice_operator.status.model_status import known_figures, remembered_report
from llmservice_operator.status.prediction_status import measured_blocks, predictions
from llmservice_operator.status.report import (
    InvalidSpecError,
    Outcome,
    PodReports,
    Surroundings,
    expected_status,
    invalid_spec_status,
    merge_patch,
    parse_service,
)
from llmservice_planner.sizing.prediction_error import Prediction

logger = logging.getLogger(__name__)

_DEFAULT_WINDOW_S = 60.0
_SETTLING_S = 10.0
"""Kubernetes observes a change within milliseconds; after this time the status says that it does not."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A service, its Deployment and its pods, as the cache shows them at the beginning of a pass."""

    service: LLMService
    raw_status: Manifest
    deployment: Manifest | None
    pods: list[Pod]
    now: float
    """In seconds since 1970, as Kubernetes' timestamps."""
    steady_s: float = 0.0
    """`now` on a monotonic clock, for durations."""

    @property
    def current(self) -> int:
        """Replicas that the Deployment is set to."""
        return int((self.deployment or {}).get("spec", {}).get("replicas", 0))

    @property
    def window_s(self) -> float:
        """How far back the signals look."""
        autoscaling = self.service.spec.autoscaling
        return units.seconds(autoscaling.metrics.window) if autoscaling else _DEFAULT_WINDOW_S

    @property
    def serving(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.serves]


class ChildrenError(Exception):
    """No children can be made of the spec: a part that is passed to the pods has another shape than Kubernetes'."""


@dataclass(slots=True)
class Memory:
    """What a pass over a service keeps for the next one. What matters after a restart is in the status as well."""

    sizer: Sizer
    startup: StartupTimes
    throttle: StatusWriteThrottle
    overload: OverloadTimer = field(default_factory=OverloadTimer)
    scaling: ScalingState | None = None
    slo: Feasibility | None = None
    slo_generation: int | None = None
    """Of the spec that `slo` was found under."""
    requested_s: float | None = None
    """When the first request came that no pod has been ready for yet, in seconds since 1970."""
    unobserved_s: float | None = None
    """Since when Kubernetes has not observed a change of the Deployment."""


def unobserved_since(deployment: Manifest | None, since_s: float | None, now: float) -> float | None:
    """Since when Kubernetes has not observed a change of the Deployment; `since_s` is the last pass's answer."""
    if observed(deployment):
        return None
    return now if since_s is None else since_s


def is_settling(unobserved_s: float | None, now: float) -> bool:
    """Whether the Deployment was changed just now, and Kubernetes may still observe it in time."""
    return unobserved_s is not None and 0 <= now - unobserved_s < _SETTLING_S


def startup_of(other: Manifest, service: LLMService) -> float | None:
    """The start-up time in another service's status, where its pods load the same model on the same GPU."""
    learned = ((other.get("status") or {}).get("autoscaling") or {}).get("startupSeconds")
    spec = other.get("spec") or {}
    model, gpu = spec.get("model") or {}, (spec.get("resources") or {}).get("gpu") or {}
    own_model, own_gpu = service.spec.model, service.spec.resources.gpu
    is_same = (model.get("uri"), model.get("revision")) == (own_model.uri, own_model.revision)
    is_same = is_same and gpu.get("product") == (own_gpu.product if own_gpu else None)
    return float(learned) if is_same and isinstance(learned, int | float) else None


@dataclass(slots=True)
class Reconciler:
    """Does the I/O of passes; what to do is decided by the pure functions that it calls."""

    client: KubeClient
    cache: ObjectCache
    applier: Applier
    read_model: ReadModel
    signals: Signals
    pod_models: PodModels
    metrics: OperatorMetrics
    server_image: str
    grants: Grants
    held: HeldRequests
    clock: Callable[[], float] = time.time
    peers: PlatformPeers = DEFAULT_PEERS
    """Who may reach every service's pods, as NetworkPolicyPeers."""
    public_keys: Callable[[], str | None] = lambda: None
    """The gateway's, where it signs requests."""
    monotonic: Callable[[], float] = time.monotonic
    _memories: dict[tuple[str, str, str], Memory] = field(default_factory=dict)
    _events: EventRecorder = field(init=False)
    _in_sync: InSyncCache = field(init=False)

    def __post_init__(self) -> None:
        self._events = EventRecorder(self.client)
        self._in_sync = InSyncCache(self.cache)

    async def run_pass(self, namespace: str, name: str) -> bool:
        """Reconcile one service; False once it is gone. Raises KubeError."""
        if not self.cache.is_read(namespace):
            return True  # its watch of services was faster: a later pass sees its pods too
        try:
            seen = self._observe(namespace, name)
        except InvalidSpecError as error:
            conditions, patch = invalid_spec_status(error, self.clock())
            self.metrics.sized(namespace, name, "InvalidSpec")
            self.metrics.reported(namespace, name, {one.type: one.status for one in conditions}, {})
            if patch:
                self.cache.put(KIND, await self.client.patch_status(namespace, name, patch))
            return True
        if seen is None:
            self.forget(namespace, name)
            return False
        memory = self._memory(seen)
        memory.startup.observe(seen.pods, seen.now, seen.steady_s)
        predicted = await self._size(seen, memory)
        sizing = _as_given(seen.service, predicted, seen.deployment)
        reports = await self._reports(seen, memory, sizing)
        before = memory.slo if memory.slo_generation == seen.service.metadata.generation else None
        slo = memory.slo = feasibility_of(seen.service.spec.slo, sizing, reports.load, before)
        memory.slo_generation = seen.service.metadata.generation
        decision = self._decide(seen, memory, sizing, reports.load)
        refusals = await self._apply(seen, reports.load, predicted, decision)
        deployment = self._deployment(seen.service)
        sizing = _as_given(seen.service, predicted, deployment)
        memory.unobserved_s = unobserved_since(deployment, memory.unobserved_s, seen.steady_s)
        allowance, memory.throttle = memory.throttle.allow(seen.steady_s, seen.window_s)
        outcome = Outcome(
            sizing=sizing,
            reports=reports,
            decision=decision,
            current=seen.current,
            slo=slo_verdict(slo),
            refusals=refusals,
            scaling=memory.scaling.shifted(seen.now - seen.steady_s) if memory.scaling else None,
            startup_s=memory.startup.p90_s,
            settling=is_settling(memory.unobserved_s, seen.steady_s),
            surroundings=self._surroundings(seen.service),
            allowance=allowance,
        )
        await self._write_status(seen, deployment, outcome)
        return True

    def forget(self, namespace: str, name: str) -> None:
        """Drop all state of a service that is gone."""
        for key in [key for key in self._memories if key[:2] == (namespace, name)]:
            del self._memories[key]
        self.applier.forget(namespace, name)
        self._in_sync.forget((namespace, name))
        self._events.forget(namespace, name)
        self.held.forget((namespace, name))
        self.metrics.forget(namespace, name)

    def _observe(self, namespace: str, name: str) -> Observation | None:
        """From the cache: a pass that changes nothing sends no request to the API server."""
        manifest = self.cache.service(namespace, name)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            return None
        service = parse_service(manifest)
        pods = pods_of(self.cache.pods(namespace, name))
        status = manifest.get("status") or {}
        return Observation(service, status, self._deployment(service), pods, self.clock(), self.monotonic())

    def _deployment(self, service: LLMService) -> Manifest | None:
        """The service's own Deployment as the cache has it now."""
        deployment = self.cache.child("Deployment", *service.key)
        return deployment if deployment is not None and owned_by(deployment, service.metadata.uid) else None

    def _memory(self, seen: Observation) -> Memory:
        """By uid, so that a service that is created anew under an old name starts with an empty memory."""
        key = (*seen.service.key, seen.service.metadata.uid)
        if key not in self._memories:
            known = seen.service.status.autoscaling
            self._memories[key] = Memory(
                Sizer(self.read_model),
                StartupTimes(self._learned_start_s(seen.service), seen.service.status.ready_replicas),
                StatusWriteThrottle(seen.steady_s, resumed=known is not None),
                slo=remembered_slo(seen.service),
                slo_generation=seen.service.metadata.generation,
                requested_s=None if seen.serving else woken_since(known),
            )
        return self._memories[key]

    def _learned_start_s(self, service: LLMService) -> float | None:
        """The start-up time that the status kept, or else that of another service with the same model and GPU."""
        own = service.status.autoscaling
        if own is not None and own.startup_seconds is not None:
            return own.startup_seconds
        others = (self.cache.service(*key) for key in self.cache.services())
        return max((found for one in others if one and (found := startup_of(one, service)) is not None), default=None)

    async def _size(self, seen: Observation, memory: Memory) -> Sized | SizingProblem:
        """With the figures that the status has; a server that sized itself is asked for its report."""
        spec = seen.service.spec
        known = known_figures(seen.service.status.model, spec.model)
        report = None
        if known is not None and known.source == "pod":
            report = await self.pod_models.report(seen.pods, spec.model.identity)
            report = report or remembered_report(seen.service.status.sizing, known, spec.engine.block_size)
        return await memory.sizer.size(spec, seen.now, known, report)

    async def _reports(self, seen: Observation, memory: Memory, sizing: Sized | SizingProblem) -> PodReports:
        load = await self._load(seen, sizing)
        return PodReports(
            load=load,
            fetching=await self.pod_models.fetching(seen.pods),
            adapters=await self.pod_models.adapters(seen.pods) if seen.service.spec.adapters else {},
            predictions=await self._predictions(seen, memory, sizing, load),
            cold_start=await self._cold_start(seen, memory),
        )

    async def _load(self, seen: Observation, sizing: Sized | SizingProblem) -> Load | None:
        if not seen.serving or (isinstance(sizing, Sized) and sizing.max_num_seqs is None):
            return None  # a pod's load means nothing before its number of slots is known
        autoscaling = seen.service.spec.autoscaling
        source = autoscaling.metrics.source if autoscaling else "auto"
        return await self.signals.load(source, seen.service.namespace, seen.serving, seen.window_s, seen.now)

    async def _predictions(
        self, seen: Observation, memory: Memory, sizing: Sized | SizingProblem, load: Load | None
    ) -> list[Prediction]:
        if isinstance(sizing, SizingProblem):
            return []
        steps = await self.pod_models.steps(seen.pods, seen.service.spec.model.identity, seen.steady_s)
        found = predictions(sizing, load, steps, memory.startup.last_s)
        self.metrics.predicted(*seen.service.key, {each.quantity: each.error_ratio for each in found})
        return found

    async def _cold_start(self, seen: Observation, memory: Memory) -> ColdStart | None:
        """In the pass that first sees a pod ready after requests had to wait for one."""
        pod = first_ready(seen.pods)
        if memory.requested_s is None or pod is None:
            return None
        start = cold_start(pod, memory.requested_s, await self.pod_models.compile_s(pod))
        memory.requested_s = None
        if start is not None:
            self.metrics.started_cold(start.phases())
        return start

    def _decide(self, seen: Observation, memory: Memory, sizing: Sized | SizingProblem, load: Load | None) -> Decision:
        service, metrics = seen.service, self.metrics
        supply = supply_of(seen.deployment, seen.pods, memory.startup)
        held = self.held.of(service.key)
        demand: Load | Held | None = held
        if seen.current:
            demand = load if load is None or held is None else load.with_held(held.requests)
        decision, memory.scaling = decide_replicas(
            service, sizing, demand, supply, memory.scaling, seen.now, seen.steady_s, slo=memory.slo
        )
        if service.spec.autoscaling is not None and seen.serving and not decision.active and isinstance(sizing, Sized):
            why = self.signals.why_none(service.spec.autoscaling.metrics.source)
            decision = replace(decision, reasons=(f"{why}: holding at {decision.replicas}",)) if why else decision
        self._track_zero(seen, memory, decision)
        metrics.sized(*service.key, sizing.reason if isinstance(sizing, SizingProblem) else None)
        if service.spec.autoscaling is not None:
            metrics.decided(seen.current, decision.replicas, decision.reasons)
            wanted = decision.wanted if decision.active else 0
            memory.overload, lasted_s = memory.overload.observe(wanted, supply.ready, seen.steady_s)
            if lasted_s is not None:
                metrics.overload_ended(lasted_s)
        return decision

    def _track_zero(self, seen: Observation, memory: Memory, decision: Decision) -> None:
        """Gateways are read from the time at which a service is at zero until they hold nothing for it any more."""
        key, autoscaling = seen.service.key, seen.service.spec.autoscaling
        held = self.held.of(key)
        waits = held is not None and held.requests > 0
        self.held.forget(key)
        if autoscaling is None or autoscaling.min_replicas > 0:
            return
        if decision.replicas == 0:
            self.held.at_zero.add(key)
        elif waits or not seen.serving:
            self.held.starting.add(key)
        is_first = seen.current == 0 and memory.requested_s is None
        if held is not None and waits and decision.replicas and is_first:
            memory.requested_s = seen.now - held.oldest_s
            self.metrics.woke_up(*key)

    async def _apply(
        self, seen: Observation, load: Load | None, predicted: Sized | SizingProblem, decision: Decision
    ) -> list[Refusal]:
        """Apply the children; those that can't be applied are returned with the reason."""
        if isinstance(predicted, SizingProblem):
            return []
        if (refused := await self.grants.refusal(seen.service)) is not None:
            return [Refusal("Deployment", refused)]
        if decision.replicas < seen.current and load is not None:
            await self._set_deletion_costs(seen, load)
        try:
            refusals = await self._apply_children(seen, load, predicted, decision.replicas)
        except ChildrenError as error:
            return [Refusal("Deployment", Trouble("InvalidSpec", str(error)))]
        dropped = image_volume_trouble(predicted.model.location, seen.deployment)
        return refusals if dropped is None else [*refusals, Refusal("Deployment", dropped)]

    async def _apply_children(
        self, seen: Observation, load: Load | None, predicted: Sized, replicas: int
    ) -> list[Refusal]:
        """With the number of sequences that the pods have; where they are replaced anyway, with the corrected one."""
        service, metadata, live = seen.service, seen.service.metadata, seen.deployment
        public_keys = self.public_keys()
        given = given_of(live)
        sized = as_given(service.spec, predicted, given)
        inputs = ChildInputs(metadata.uid, metadata.generation, sized, replicas, public_keys)
        if self._in_sync.has(service.key, inputs):
            return []
        children = self._expected_children(service, sized, replicas, public_keys)
        if live is not None and _replaces_pods(children, live):
            blocks = measured_blocks(load, seen.pods, live) or _remembered_blocks(seen)
            sized = corrected(service.spec, predicted, given, blocks)
            if sized != inputs.sized:
                inputs = replace(inputs, sized=sized)
                children = self._expected_children(service, sized, replicas, public_keys)
        refusals = await self.applier.apply(children, metadata.uid, metadata.generation)
        if refusals:
            self._in_sync.forget(service.key)
        else:
            self._in_sync.add(service.key, inputs, children)
        return refusals

    def _expected_children(
        self, service: LLMService, sized: Sized, replicas: int, public_keys: str | None
    ) -> list[Child]:
        """Raises ChildrenError, so that what the schema lets through is reported in the status."""
        try:
            return expected_children(service, sized, replicas, self.server_image, self.peers, public_keys)
        except Exception as error:
            logger.exception("%s/%s: no children can be made of the spec", *service.key)
            raise ChildrenError(
                f"no pod can be made of the spec ({type(error).__name__}: {error}): correct what is passed to it in"
                " Kubernetes' own shape, in scheduling, podTemplate or networkPolicy"
            ) from error

    async def _set_deletion_costs(self, seen: Observation, load: Load) -> None:
        """Kubernetes removes the pods with the lowest cost first: those with the fewest requests in flight."""
        in_flight = {pod.name: pod.in_flight for pod in load.pods}
        for pod in seen.serving:
            cost = str(round(in_flight.get(pod.name, 0)))
            if pod.deletion_cost != cost:
                answer = await self.client.annotate_pod(seen.service.namespace, pod.name, {labels.DELETION_COST: cost})
                if answer is not None:
                    self.cache.put("Pod", answer)

    def _surroundings(self, service: LLMService) -> Surroundings:
        return Surroundings(
            name_holder=self.cache.name_holder(service.served_name),
            gateway_signs=self.public_keys() is not None,
            pool=self.cache.child("InferencePool", *service.key),
            pools_installed=not self.cache.lacks("InferencePool"),
        )

    async def _write_status(self, seen: Observation, deployment: Manifest | None, outcome: Outcome) -> None:
        service = seen.service
        status = expected_status(service, deployment, seen.pods, outcome, seen.now)
        patch = merge_patch(seen.raw_status, status.model_dump(by_alias=True, exclude_none=True))
        measured = status.sizing.measured if status.sizing else None
        self.metrics.reported(
            *service.key,
            {condition.type: condition.status for condition in status.conditions},
            {
                "desired_replicas": outcome.desired,
                "ready_replicas": len(seen.serving),
                "ttft_target_seconds": service.spec.slo.ttft_p99_s,
                "prediction_error_percent": measured.error_percent if measured else None,
                **_flow(outcome.decision.forecast),
            },
        )
        # Before the status: if this pass ends in between, the next one still sees the same transitions.
        await self._events.post(*service.key, self._new_events(seen, outcome, status) if patch else (), seen.now)
        if not patch:
            return
        try:
            self.cache.put(KIND, await self.client.patch_status(*service.key, patch))
        except KubeError as error:
            if error.status != 404:  # else deleted meanwhile: the next pass will see it
                raise

    def _new_events(self, seen: Observation, outcome: Outcome, status: LLMServiceStatus) -> list[Manifest]:
        """What changed since the status was last written, however many passes have failed since then."""
        service, known = seen.service, seen.service.status.autoscaling
        events = transition_events(service, status, seen.now)
        before = known.desired_replicas if known else outcome.desired
        if seen.deployment is not None and seen.current != outcome.desired:
            before = seen.current
        if before != outcome.desired and not outcome.is_held:
            events.append(scaled_event(service, before, outcome.desired, outcome.decision.reasons, seen.now))
        return events


def _as_given(
    service: LLMService, predicted: Sized | SizingProblem, deployment: Manifest | None
) -> Sized | SizingProblem:
    if isinstance(predicted, SizingProblem):
        return predicted
    return as_given(service.spec, predicted, given_of(deployment))


def _replaces_pods(children: Sequence[Child], live: Manifest) -> bool:
    expected = next(one.manifest for one in children if one.kind.name == "Deployment")
    return template_of(expected) != template_of(live)


def _remembered_blocks(seen: Observation) -> int | None:
    """What pods measured before the service was scaled to zero."""
    sizing = seen.service.status.sizing
    return sizing.measured.blocks if sizing and sizing.measured and not seen.serving else None


def _flow(forecast: Forecast | None) -> dict[str, float | None]:
    """What arrives and what one replica serves of it, as gauges."""
    capacity = forecast.capacity if forecast else None
    return {
        "demand_tokens_per_second": forecast.demand.tokens if forecast else None,
        "replica_tokens_per_second": capacity.serves.tokens if capacity else None,
        "load_replicas": forecast.level if forecast else None,
        "predicted_load_replicas": forecast.predicted if forecast else None,
    }
