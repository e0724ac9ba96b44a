"""`spec` of an LLMService. The CRD's schema is generated from these models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from llmservice_operator.api import units
from llmservice_operator.api.autoscaling_spec import Autoscaling
from llmservice_operator.api.engine_spec import Engine, Resources
from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.api.pod_spec import CountOrPercent, LabelValue, Passed, PodTemplate, Scheduling
from llmservice_operator.api.schema_model import SchemaModel, rules
from llmservice_operator.api.units import Duration
from llmservice_planner.sizing.workload import Workload

Interval = Annotated[
    str,
    StringConstraints(
        pattern=r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$",
        min_length=1,
        max_length=16,
    ),
]
"""As PodMonitors take it: without fractions."""


class Slo(SchemaModel):
    ttft_p99: Duration | None = Field(
        None, description="Target: 99 % of requests see their first token within this time. Drives scaling."
    )
    itl_p99: Duration | None = Field(
        None, description="Target: 99 % of the times between two tokens are at most this. Bounds maxNumSeqs: auto."
    )

    @property
    def ttft_p99_s(self) -> float | None:
        return units.seconds(self.ttft_p99) if self.ttft_p99 else None

    @property
    def itl_p99_s(self) -> float | None:
        return units.seconds(self.itl_p99) if self.itl_p99 else None


class Lanes(SchemaModel):
    default: Literal["interactive", "batch"] | None = Field(
        None,
        description="Lane of requests that choose none, and the highest that a client may choose. Default: interactive,"
        " or batch where workload is batch. A request for a higher lane is refused with 403."
        " Where the server has API keys (--api-key-file), a key with a lane of its own has that one instead.",
    )
    batch_order: Literal["fcfs", "sjf"] = Field(
        "fcfs",
        description="How the batch lane orders a client's waiting requests: by arrival, or those predicted to be"
        " shortest first, with ageing, which shortens the mean wait and lengthens the longest ones.",
    )


class Rollout(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!(string(self.maxSurge).matches('^0+%?$') && string(self.maxUnavailable).matches('^0+%?$'))",
                "maxSurge and maxUnavailable can't both be 0: no pod could ever be replaced",
            )
        )
    )

    max_surge: CountOrPercent = Field(
        1, description="Replicas above the wanted number while a change rolls out; each needs a spare GPU."
    )
    max_unavailable: CountOrPercent = Field(0, description="Replicas that may be missing while a change rolls out.")


class Monitoring(SchemaModel):
    pod_monitor: bool = Field(
        True, description="Create a PodMonitor for the Prometheus Operator, where its CRD is installed."
    )
    interval: Interval = Field("15s", description="How often the PodMonitor has the pods scraped.")
    prometheus_rule: bool = Field(
        True,
        description="Create a PrometheusRule with this service's alerts, where its CRD is installed. Where the chart's"
        " rules reach the same Prometheus, Alertmanager takes the two for one.",
    )
    labels: dict[str, LabelValue] = Field(
        default_factory=dict,
        max_length=16,
        description="Labels that your Prometheus selects PodMonitors and PrometheusRules by.",
    )


class EndpointPicker(SchemaModel):
    name: str | None = Field(
        None,
        min_length=1,
        max_length=63,
        pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$",
        description="The picker's Service, in the service's namespace. Default: NAME-epp, as its own chart calls it.",
    )
    port: int = Field(9002, ge=1, le=65535, description="Port of that Service.")
    failure_mode: Literal["FailOpen", "FailClose"] = Field(
        "FailOpen",
        description="While the picker does not answer, the gateway takes any pod (FailOpen) or refuses (FailClose).",
    )


class GatewaySpec(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.endpointPicker) || self.inferencePool",
                "endpointPicker needs inferencePool: true, of which it is a part",
            ),
        )
    )

    inference_pool: bool = Field(
        False,
        description="Create an InferencePool (Gateway API Inference Extension v1) of the pods, where its CRD is"
        " installed, for HTTPRoutes of a Gateway with an endpoint picker.",
    )
    endpoint_picker: EndpointPicker | None = Field(None, description="Which picker chooses among the pods.")


class Routing(SchemaModel):
    strategy: Literal["prefixAffinity", "leastLoad"] = Field(
        "prefixAffinity",
        description="How the gateway chooses a pod. prefixAffinity: the one that has the beginning of the prompt (the"
        " conversation, by its first messages) in its KV cache, while its load is near the mean. leastLoad: the one"
        " with the fewest tokens in flight.",
    )


class NetworkPolicy(SchemaModel):
    enabled: bool = Field(
        True,
        description="Let only the gateway, the operator, Prometheus and `from` reach the pods, and the pods only DNS,"
        " the model's source and `to`, where the cluster's network enforces policies. false: no NetworkPolicy,"
        " all clients may, and the pods may reach everything.",
    )
    peers: list[Passed] = Field(
        default_factory=list,
        alias="from",
        max_length=32,
        description="Clients that call the Service directly, as NetworkPolicyPeers in Kubernetes' own shape"
        " (namespaceSelector, podSelector, ipBlock). Clients of the gateway need none. With gateway.inferencePool they"
        " reach /metrics too: list the Gateway's proxies and the endpoint picker.",
    )
    to: list[Passed] = Field(
        default_factory=list,
        max_length=32,
        description="What else the pods may reach, as NetworkPolicyEgressRules in Kubernetes' own shape (to, ports):"
        " a proxy, an OTLP collector, the metadata server of a cloud's workload identity. `{}` allows everything.",
    )


DEFAULT_MAX_LORAS = 4


class Adapter(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                r"self.uri.matches('^(hf://[^/]+/[^/]+|s3://[^/]+|file:///[^/])')",
                "uri must be hf://org/name[@revision], s3://bucket/path or file:///path (in the pod)",
            ),
        )
    )

    name: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/:-]*[A-Za-z0-9])?$",
        description="The name that clients put in `model`.",
    )
    uri: str = Field(
        min_length=7,
        max_length=1024,
        pattern=r"^[^\x00-\x1f\x7f]+$",
        description="A folder in PEFT's format: hf://org/name[@revision], s3://bucket/path, or file:///path of a volume"
        " in the pod. It is fetched again when this changes.",
    )
    pinned: bool = Field(False, description="Never evict it from memory.")


_NO_ADAPTERS = "!has(self.adapters) || size(self.adapters) == 0"
_OTHER_NAMES = "self.adapters.all(one, one.name != self.model.servedName)"


_UNCHANGED_REPLICAS = "(oldSelf.hasValue() && self.replicas == oldSelf.value().replicas)"
_BUDGET = "self.autoscaling.maxGPUHoursPerDay"
_HAS_BUDGET = f"has(self.autoscaling) && has({_BUDGET})"
_ON_GPU = "(has(self.resources.gpu) && self.resources.gpu.count > 0)"
_HAS_CLAIM = "(has(self.podTemplate.resourceClaims) && size(self.podTemplate.resourceClaims) > 0)"
_NO_RESOURCE = "has(self.resources.gpu.resourceName) && self.resources.gpu.resourceName == ''"


class LLMServiceSpec(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"{_NO_ADAPTERS} || !has(self.engine.maxLoras) || self.engine.maxLoras > 0",
                "adapters need engine.maxLoras of at least 1: raise it, or leave it out",
            ),
            (
                f"{_NO_ADAPTERS} || !has(self.model.servedName) || {_OTHER_NAMES}",
                "adapters can't have the model's own name (model.servedName): choose another",
            ),
            (  # a scale of before autoscaling stays, for a manifest without replicas can't remove another manager's
                f"!has(self.autoscaling) || self.replicas == 1 || {_UNCHANGED_REPLICAS}",
                "replicas is ignored where autoscaling is set: set autoscaling.minReplicas instead",
            ),
            (
                f"!({_HAS_BUDGET}) || {_ON_GPU}",
                "autoscaling.maxGPUHoursPerDay needs resources.gpu: this service runs on CPU",
            ),
            (
                f"!({_HAS_BUDGET} && {_ON_GPU}) || {_BUDGET} > double(self.resources.gpu.count)",
                "autoscaling.maxGPUHoursPerDay must be above resources.gpu.count: replicas run while an hour is left",
            ),
            (
                f"!({_ON_GPU} && {_NO_RESOURCE}) || {_HAS_CLAIM}",
                "resources.gpu.resourceName is empty, so podTemplate.resourceClaims must have the GPU: name its claim",
            ),
            (
                "!self.gateway.inferencePool || self.access == 'direct'",
                "gateway.inferencePool needs access: direct, for requests through a pool are not signed by our gateway",
            ),
            (
                "!self.gateway.inferencePool || !has(self.autoscaling) || self.autoscaling.minReplicas > 0",
                "gateway.inferencePool needs autoscaling.minReplicas of at least 1: nothing holds a pool's requests",
            ),
        )
    )

    model: ModelSource = Field(description="Which model is served, and under which name.")
    workload: Workload | None = Field(
        None,
        description="What the service is for: chat, longContext, batch or embeddings. It chooses engine settings that"
        " are not set, by the planner's arithmetic, with the reasons in status.sizing.",
    )
    adapters: list[Adapter] = Field(
        default_factory=list,
        max_length=64,
        description="LoRA adapters, each a model of its own for clients. Pods load and unload them while they serve.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    replicas: int = Field(
        1,
        ge=0,
        le=1000,
        description="Fixed number of replicas; `kubectl scale llm`, an HPA or KEDA write it. Ignored with autoscaling,"
        " where it can only be set to 1.",
    )
    resources: Resources = Field(default_factory=Resources, description="What one replica gets.")
    engine: Engine = Field(default_factory=Engine, description="How the inference engine is set up.")
    slo: Slo = Field(default_factory=Slo, description="The latency targets.")
    lanes: Lanes = Field(
        default_factory=Lanes,
        description="Which lane requests are served in: interactive goes first, batch takes what it leaves.",
    )
    autoscaling: Autoscaling | None = Field(
        None,
        description="Let the operator choose the number of replicas; replicas is ignored then. Where this is removed,"
        " replicas counts again at once: set both in one change.",
    )
    gateway: GatewaySpec = Field(
        default_factory=GatewaySpec, description="What gateways other than this project's own need."
    )
    routing: Routing = Field(default_factory=Routing, description="How the gateway spreads requests over the pods.")
    rollout: Rollout = Field(default_factory=Rollout, description="How a changed pod template reaches the pods.")
    access: Literal["gateway", "direct"] = Field(
        "gateway",
        description="Whose requests the pods take, where the gateway has API keys: gateway, only those that it has"
        " signed; direct, also those of clients that reach the Service, to which no key's limits apply.",
    )
    drain_timeout: Duration = Field("60s", description="How long a terminating pod may finish its requests.")
    scheduling: Scheduling = Field(default_factory=Scheduling, description="Where pods may run.")
    pod_template: PodTemplate = Field(default_factory=PodTemplate, description="Further fields of the pods.")
    network_policy: NetworkPolicy = Field(
        default_factory=NetworkPolicy,
        description="Who may reach the pods besides the gateway, and what they may reach.",
    )
    monitoring: Monitoring = Field(default_factory=Monitoring, description="How Prometheus finds the pods.")

    @property
    def gpus(self) -> int:
        """Of one replica."""
        return self.resources.gpu.count if self.resources.gpu else 0

    @property
    def default_lane(self) -> Literal["interactive", "batch"]:
        """`lanes.default`, or its default."""
        return self.lanes.default or ("batch" if self.workload == "batch" else "interactive")

    @property
    def max_loras(self) -> int:
        """`engine.maxLoras`, or its default."""
        given = self.engine.max_loras
        return given if given is not None else DEFAULT_MAX_LORAS if self.adapters else 0


Manifest = dict[str, Any]
"""A Kubernetes object as plain data."""
