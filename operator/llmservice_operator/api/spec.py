"""`spec` of an LLMService. The CRD's schema is generated from these models."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import ConfigDict, Field, StringConstraints, WithJsonSchema, field_validator

from llmservice_operator.api import units
from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.api.pod_spec import CountOrPercent, LabelValue, Passed, PodTemplate, Scheduling
from llmservice_operator.api.schema_model import SchemaModel, rules
from llmservice_planner.sizing.overhead import PROCESS_BYTES
from llmservice_planner.sizing.workload import Workload

Duration = Annotated[str, StringConstraints(pattern=units.DURATION_PATTERN, max_length=16)]
Quantity = Annotated[str, StringConstraints(pattern=units.QUANTITY_PATTERN, max_length=32)]
Interval = Annotated[
    str,
    StringConstraints(
        pattern=r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$",
        min_length=1,
        max_length=16,
    ),
]
"""As PodMonitors take it: without fractions."""
TimeOfDay = Annotated[str, StringConstraints(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$", max_length=5)]
AutoOrCount = Annotated[
    Literal["auto"] | int,
    WithJsonSchema(
        {"x-kubernetes-int-or-string": True, "pattern": "^auto$", "minimum": 1, "maximum": 1024, "maxLength": 4}
    ),
]


class Gpu(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.resourceName) || !self.resourceName.contains('/mig-') || has(self.memoryGiB)",
                "memoryGiB is needed where resourceName is a MIG device's: it has a part of the GPU's memory",
            )
        )
    )

    product: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
        description="The GPU, such as h100-80gb or l4; `llmservice plan --help` lists those known.",
    )
    count: int = Field(
        1, ge=0, le=16, description="GPUs per replica (tensor parallel). 0 runs on CPU, within requests.memory."
    )
    memory_gib: float | None = Field(
        None, alias="memoryGiB", gt=0, le=4096, description="Memory of one GPU where it is less than the catalogue's."
    )
    resource_name: str | None = Field(
        None,
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$",
        description="What a pod requests it as, such as nvidia.com/mig-3g.40gb or nvidia.com/gpu.shared; default: the"
        " vendor's nvidia.com/gpu or amd.com/gpu. Empty: nothing, as podTemplate.resourceClaims have the GPU.",
    )


class ResourceAmounts(SchemaModel):
    cpu: Quantity = Field("1", description="CPU cores of one replica.")
    memory: Quantity = Field(
        "4Gi", description="Memory of one replica. On CPU the weights and the KV cache must fit in it."
    )


class ResourceLimits(SchemaModel):
    cpu: Quantity | None = Field(None, description="Upper bound on CPU; none by default, so that idle cores help.")
    memory: Quantity | None = Field(None, description="Upper bound on memory; a server past it is OOMKilled.")


_LEAST_MEMORY = f"{PROCESS_BYTES >> 20}Mi"


def _within_limit(name: str) -> str:
    asked, limit = f"quantity(self.requests.{name})", f"quantity(self.limits.{name})"
    return f"!has(self.limits.{name}) || !{asked}.isGreaterThan({limit})"


class Resources(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.gpu) || self.gpu.count == 0 || has(self.gpu.product)",
                "gpu.product is needed where gpu.count is above 0: the GPU's memory decides how many sequences fit",
            ),
            (
                "!has(self.gpu) || self.gpu.count <= 1",
                "gpu.count above 1 needs tensor parallelism, which the server lacks: choose one that holds the model",
            ),
            (_within_limit("cpu"), "requests.cpu must not be above limits.cpu: no pod could be created"),
            (_within_limit("memory"), "requests.memory must not be above limits.memory: no pod could be created"),
            (
                f"!quantity('{_LEAST_MEMORY}').isGreaterThan(quantity(self.requests.memory))",
                f"requests.memory must be at least {_LEAST_MEMORY}: Python and PyTorch alone take as much",
            ),
        )
    )

    gpu: Gpu | None = Field(None, description="Accelerator of one replica. Absent: runs on CPU.")
    requests: ResourceAmounts = Field(
        default_factory=ResourceAmounts, description="What the scheduler reserves for one replica."
    )
    limits: ResourceLimits = Field(default_factory=ResourceLimits, description="What one replica may not exceed.")


class Sizing(SchemaModel):
    expected_tokens: int | None = Field(
        None,
        ge=1,
        le=16777216,
        description="Tokens (prompt and answer) that a typical request uses; the server counts with them until enough"
        " requests have ended. Default: 1536, or maxModelLen if that is less.",
    )


_EXPECTED = "self.sizing.expectedTokens"


class Engine(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"!has(self.maxModelLen) || !has({_EXPECTED}) || {_EXPECTED} <= self.maxModelLen",
                "sizing.expectedTokens must not be above maxModelLen: no request is longer than that",
            ),
            (  # the API server rounds a minimum of 0.1 down for a value without a fraction
                "self.gpuMemoryUtilization >= 0.1",
                "gpuMemoryUtilization must be at least 0.1: it is a share of the memory",
            ),
        )
    )

    max_model_len: int | None = Field(
        None, ge=1, le=16777216, description="Longest sequence, prompt and answer. Default: what the model supports."
    )
    max_num_seqs: AutoOrCount = Field(
        "auto", description="Sequences in a step, at most: auto computes it from model and GPU; or 1 to 1024."
    )
    sizing: Sizing = Field(default_factory=Sizing, description="What requests are expected to use.")
    gpu_memory_utilization: float = Field(
        0.9, ge=0.1, le=0.99, description="Share of the GPU's memory (of requests.memory on CPU) that may be used."
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Type of the KV cache: auto is the model's."
    )
    block_size: Literal[8, 16, 32, 64, 128] = Field(16, description="Tokens per KV block.")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=16,
        le=1048576,
        description="Token budget of one engine step. Default: by the GPU's memory, 2048 or 8192, and slo.itlP99.",
    )
    max_loras: int | None = Field(
        None,
        ge=0,
        le=64,
        description="Slots for LoRA adapters in memory, counted before the KV cache; of more adapters those unused for"
        " longest are evicted. Default: 4 where adapters are listed, else 0. A change replaces the pods.",
    )
    max_lora_rank: int = Field(16, ge=1, le=512, description="Rank of an adapter, at most: the size of a slot.")
    lora_experts: bool = Field(
        False,
        description="Slots also hold what adapters change in a mixture's experts, which takes most of their memory."
        " A change replaces the pods.",
    )
    prefix_caching: bool = Field(True, description="Reuse the KV cache of equal prompt prefixes.")
    swap_space_gib: float = Field(
        0,
        alias="swapSpaceGiB",
        ge=0,
        le=4096,
        description="CPU memory for the KV cache of preempted sequences, out of the pod's memory. 0: compute it again.",
    )


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


_A_STEP = rules(
    (
        "self.stepReplicas > 0 || self.stepPercent > 0",
        "stepReplicas and stepPercent can't both be 0: no replica could ever be added or removed",
    )
)


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


class ScaleUp(SchemaModel):
    model_config = ConfigDict(json_schema_extra=_A_STEP)

    stabilization: Duration = Field(
        "10s",
        description="Add only up to the lowest recommendation within this time. 0s: at once, as a burst or certain"
        " growth is answered in any case.",
    )
    step_replicas: int = Field(
        4, ge=0, le=1000, description="Add at most so many replicas in stepPeriod, or stepPercent where that is more."
    )
    step_percent: int = Field(
        100, ge=0, le=1000, description="Add at most this share of the replicas in stepPeriod, or stepReplicas."
    )
    step_period: Duration = Field("15s", description="The period of stepReplicas and stepPercent.")
    cooldown: Duration = Field("0s", description="Add none within this time of the last change, up or down.")


class ScaleDown(SchemaModel):
    model_config = ConfigDict(json_schema_extra=_A_STEP)

    stabilization: Duration | None = Field(
        None,
        description="Remove replicas only down to the highest recommendation within this time. Default: four times the"
        " start-up time that was learned, 120s to 300s; half of the surplus is removed after half a start.",
    )
    step_replicas: int = Field(
        0,
        ge=0,
        le=1000,
        description="Remove at most so many replicas in stepPeriod, or stepPercent where that is more.",
    )
    step_percent: int = Field(
        100, ge=0, le=100, description="Remove at most this share of the replicas in stepPeriod, or stepReplicas."
    )
    step_period: Duration = Field("15s", description="The period of stepReplicas and stepPercent.")
    cooldown: Duration = Field("0s", description="Remove none within this time of the last change, up or down.")


class MetricsSource(SchemaModel):
    source: Literal["auto", "prometheus", "pods"] = Field(
        "auto",
        description="Where signals are read: prometheus, the pods' own /metrics, or auto:"
        " Prometheus where the operator has one, the pods otherwise and while it is down.",
    )
    window: Duration = Field("60s", description="Time over which rates and p99 TTFT are computed.")


class ScheduledReplicas(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            ("self.start != self.end", "start and end must differ: for the whole day raise autoscaling.minReplicas"),
        )
    )

    days: list[Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]] = Field(
        default_factory=list, max_length=7, description="On which days it begins. Default: on all."
    )
    start: TimeOfDay = Field(description="When it begins, as HH:MM.")
    end: TimeOfDay = Field(description="When it ends, as HH:MM; before start: on the next day.")
    time_zone: str = Field(
        "UTC",
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$",
        description="The clock of start and end, by its IANA name such as Europe/Berlin.",
    )
    min_replicas: int = Field(ge=1, le=1000, description="Never fewer replicas than this meanwhile.")

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(f"{name} is no time zone: give an IANA name such as Europe/Berlin, or UTC") from error
        return name


class Autoscaling(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            ("self.minReplicas <= self.maxReplicas", "minReplicas must not be above maxReplicas"),
            (
                "!has(self.schedule) || self.schedule.all(one, one.minReplicas <= self.maxReplicas)",
                "schedule: minReplicas must not be above maxReplicas",
            ),
            (
                "!has(self.maxGPUHoursPerDay) || self.maxGPUHoursPerDay >= 24.0 * double(self.minReplicas)",
                "maxGPUHoursPerDay must be at least 24 for each of minReplicas, which run all day",
            ),
            (
                "!has(self.idleTimeout) || self.minReplicas == 0",
                "idleTimeout needs minReplicas: 0, for otherwise the last replica always stays",
            ),
        )
    )

    min_replicas: int = Field(
        1,
        ge=0,
        le=1000,
        description="Never fewer replicas than this. 0: the last one is removed after idleTimeout, and the next request"
        " to the gateway, which waits there, starts one.",
    )
    max_replicas: int = Field(ge=1, le=1000, description="Never more replicas than this.")
    idle_timeout: Duration | None = Field(
        None,
        description="With minReplicas: 0, how long no request runs, waits or arrives before the last replica is"
        " removed. Default: 300s, about what a start costs: so at most twice the least possible GPU time is spent.",
    )
    queue_depth: int = Field(4, ge=1, le=10000, description="Waiting requests per replica that are still fine.")
    tolerance_percent: int = Field(
        10,
        ge=0,
        le=100,
        description="How far the load may deviate from what the replicas hold before they are changed. Where demand and"
        " capacity are known, this is for fewer replicas alone, and soon after a removal for more as well.",
    )
    scale_up: ScaleUp = Field(default_factory=ScaleUp, description="How fast replicas are added.")
    scale_down: ScaleDown = Field(default_factory=ScaleDown, description="How fast replicas are removed.")
    batch: Literal["fill", "scale"] = Field(
        "fill",
        description="What requests of the batch lane ask for. fill: they use what others leave, and add no replicas."
        " scale: they count like the others.",
    )
    schedule: list[ScheduledReplicas] = Field(
        default_factory=list,
        max_length=16,
        description="Times of the day with a higher minReplicas, so that replicas are ready before a known load comes;"
        " where several apply, the highest counts.",
    )
    max_gpu_hours_per_day: float | None = Field(
        None,
        alias="maxGPUHoursPerDay",
        gt=0,
        le=1000000,
        description="GPU time that all replicas may take in a day of UTC. It includes minReplicas until midnight;"
        " there are further ones only while what is left lasts for an hour.",
    )
    metrics: MetricsSource = Field(default_factory=MetricsSource, description="Where the signals come from.")


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
        None, description="Let the operator choose the number of replicas; replicas is ignored then."
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
