"""`status` of an LLMService: what was predicted and measured, and the conditions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from llmservice_operator.api.schema_model import OPEN_OBJECT, SchemaModel

MAX_DECISIONS = 12

Figures = Annotated[dict[str, Any], WithJsonSchema(OPEN_OBJECT)]
"""camelCase figures of a model, those of every family that the planner knows."""


class Condition(SchemaModel):
    type: str = Field(
        max_length=64,
        description="Ready, Progressing, Stalled, SizingValid, ScalingActive, SLOFeasible, and where they apply"
        " NameTaken, Degraded, AdaptersReady or InferencePoolReady.",
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: str = Field(
        max_length=128, pattern=r"^[A-Za-z][A-Za-z0-9]*$", description="Why, in one CamelCase word for machines."
    )
    message: str = Field(max_length=2048, description="Why, and what to change, in a sentence for people.")
    last_transition_time: str = Field(max_length=32, description="When status last flipped (RFC 3339).")
    observed_generation: int = Field(0, ge=0, description="Generation of the spec that this is about.")


class MeasuredStatus(SchemaModel):
    blocks: int = Field(ge=0, description="KV blocks that the server allocated after loading.")
    weights_gib: float | None = Field(None, alias="weightsGiB", ge=0, description="Memory of the loaded weights.")
    expected_tokens: int | None = Field(
        None,
        ge=1,
        description="Mean tokens (prompt and answer) of what arrived of late: where engine.sizing.expectedTokens is not"
        " set, what would be a good value. It changes no pod.",
    )
    error_percent: float | None = Field(
        None,
        description="Predicted blocks against measured ones; positive: predicted too many. Absent where"
        " the server sized itself.",
    )


class PredictionStatus(SchemaModel):
    quantity: Literal["blocks", "weights", "itl", "ttft", "startup"] = Field(
        description="blocks: KV blocks of a pod. itl: a step that decodes. ttft: a step that computes prompts, which is"
        " what a request of an idle pod waits for. startup: from the moment that a pod got a node until it is ready;"
        " predicted is the P90 of the start-ups before."
    )
    predicted: float = Field(ge=0, description="By the planner, for what the pods computed.")
    measured: float = Field(ge=0, description="By the pods, since they started.")
    unit: Literal["blocks", "bytes", "seconds"] = Field(description="Of both.")
    error_percent: float = Field(description="Positive: too much was predicted.")


class SizingStatus(SchemaModel):
    source: Literal["operator", "pod"] = Field(
        "operator", description="Who computed maxNumSeqs: the operator, or the server itself (pod)."
    )
    max_num_seqs: int = Field(ge=0, description="Sequences in a step of one replica, at most.")
    guaranteed_sequences: int = Field(
        0,
        ge=0,
        description="Sequences of maxModelLen that the KV cache holds: so many are never preempted. Of an encoder,"
        " which has no cache, those that a step holds.",
    )
    expected_sequences: int = Field(0, ge=0, description="Sequences of expectedTokens that the KV cache holds.")
    max_model_len: int = Field(ge=0, description="Longest sequence that is served, in tokens.")
    kv_bytes_per_token: int = Field(ge=0, description="Bytes of KV cache per token, over all GPUs of a replica.")
    weights_gib: float = Field(alias="weightsGiB", ge=0, description="Predicted memory of the weights.")
    overhead_gib: float = Field(alias="overheadGiB", ge=0, description="Predicted memory of runtime and activations.")
    kv_pool_gib: float = Field(alias="kvPoolGiB", ge=0, description="Predicted memory left for the KV cache.")
    blocks: int = Field(ge=0, description="Predicted KV blocks.")
    limited_by: str = Field(max_length=64, description="What bounds maxNumSeqs.")
    measured: MeasuredStatus | None = Field(None, description="The same, as a running server measured it.")
    max_num_seqs_measured: int | None = Field(
        None,
        ge=0,
        description="What maxNumSeqs would be with the measured blocks. Pods are not replaced for it: the"
        " next ones that replace them get it, unless the change invalidates what was measured.",
    )
    predictions: list[PredictionStatus] = Field(
        default_factory=list, max_length=8, description="What was predicted, and what pods measured."
    )
    explanation: str = Field(max_length=8192, description="The working, line by line.")


class FetchStatus(SchemaModel):
    """A download under way; absent while there is none."""

    pods: int = Field(ge=1, description="Pods that wait for the model's files.")
    percent: int | None = Field(
        None,
        ge=0,
        le=100,
        description="Share of the bytes that are there, in steps of 5; absent until a pod reports it.",
    )
    total_gib: float | None = Field(None, alias="totalGiB", ge=0, description="Size of the files in one pod.")


ModelCode = Literal["own", "transformers"]


class ModelStatus(SchemaModel):
    uri: str = Field(max_length=1024, description="The model that the rest is about.")
    revision: str | None = Field(None, max_length=128, description="Its revision, where the hub has several.")
    config_overrides: str | None = Field(
        None, description="Those of spec.model, as JSON text: a merge patch of an object would lose its nulls."
    )
    figures_from: Literal["spec", "config", "pod"] = Field(
        description="Where the model's figures come from: spec.model.shape, its config.json, or a pod."
    )
    shape: Figures | None = Field(
        None,
        description="The model's figures; absent until a pod has reported them. Kept until spec.model changes.",
    )
    weights_file_bytes: int | None = Field(None, ge=0, description="Size of the weights' files, where it is known.")
    code: ModelCode | None = Field(
        None, description="Whose code computes it in the pods: the server's own, or transformers'."
    )
    fetch: FetchStatus | None = Field(None, description="The download, while there is one.")


class DecisionStatus(SchemaModel):
    time: str = Field(max_length=32, description="When it was decided (RFC 3339).")
    wanted: int = Field(ge=0, description="Replicas that the load asks for.")
    replicas: int = Field(ge=0, description="Replicas that were set, after limits.")
    load: float | None = Field(
        None, ge=0, description="The demand then, in replicas that would be busy all the time; absent where unknown."
    )
    reasons: list[str] = Field(default_factory=list, max_length=16, description="Each step's reason.")


class SignalStatus(SchemaModel):
    name: str = Field(max_length=32, description="queue, utilization, kvCache, arrivals or ttftP99.")
    value: float | None = Field(
        None, description="As last written: small changes are not. Absent where the window holds too little."
    )
    target: float | None = Field(None, description="Above it replicas are added; absent while none is known.")
    unit: str = Field(max_length=64, description="What value and target count.")
    query: str = Field(max_length=2048, description="The same figure as PromQL, for a graph or an alert.")


class CapacityStatus(SchemaModel):
    requests_per_second: float = Field(ge=0, description="What one full replica was measured to finish.")
    measured_at: str = Field(max_length=32, description="When, give or take half an hour (RFC 3339).")
    correction: float = Field(
        1.0, gt=0, description="Of the latency model: what full replicas did against what it predicts."
    )


class DemandStatus(SchemaModel):
    """What arrives in the window, and what one replica serves of it."""

    requests_per_second: float = Field(ge=0, description="Requests that arrive, refused ones too.")
    prompt_tokens_per_second: float = Field(ge=0, description="Prompt tokens of them that are not in the prefix cache.")
    output_tokens_per_second: float = Field(ge=0, description="Output tokens of them, as predicted at arrival.")
    replica_requests_per_second: float | None = Field(
        None, ge=0, description="Requests of these lengths that one replica serves, used to the full."
    )
    replica_tokens_per_second: float | None = Field(
        None, ge=0, description="Prompt and output tokens that one replica serves of this mix."
    )
    source: Literal["predicted", "measured"] | None = Field(
        None,
        description="Where the replica's capacity is from: predicted by the latency model and corrected by"
        " measurements, or measured alone.",
    )
    load: float = Field(ge=0, description="The demand in replicas that would be busy all the time.")
    predicted_load: float = Field(ge=0, description="The same at the end of the horizon, by the trend.")
    horizon_seconds: int = Field(ge=0, description="How far the prediction reaches: the time that a start takes.")
    burst: bool = Field(False, description="Whether the last seconds' demand is far above that before.")


class GpuHoursStatus(SchemaModel):
    day: str = Field(max_length=10, description="The day (UTC).")
    hours: float = Field(ge=0, description="GPU-hours of all replicas in it so far.")
    counted_at: str = Field(max_length=32, description="Until when they are counted (RFC 3339).")


class ColdStartStatus(SchemaModel):
    """Of the last start from zero. In seconds; the parts add up to the whole."""

    ready_at: str = Field(max_length=32, description="When the first pod was ready (RFC 3339).")
    seconds: float = Field(ge=0, description="From the first request, which waited in a gateway, until then.")
    scheduling: float = Field(ge=0, description="Of it, until the pod's first container ran: decision, node and image.")
    fetching: float = Field(ge=0, description="Of it, the download of the model.")
    loading: float = Field(ge=0, description="Of it, from the server's start until it was ready, without compiling.")
    compiling: float = Field(ge=0, description="Of it, compiling kernels, as the server reports it.")


class AutoscalingStatus(SchemaModel):
    desired_replicas: int = Field(ge=0, description="Replicas that the operator asks for now.")
    queue_depth: float | None = Field(None, ge=0, description="Waiting requests per ready replica.")
    ttft_p99_seconds: float | None = Field(
        None, ge=0, description="p99 time to first token over the window; absent without traffic."
    )
    startup_seconds: int | None = Field(
        None, ge=0, description="Learned time (P90) from the moment that a pod got a node until it is ready."
    )
    last_cold_start: ColdStartStatus | None = Field(
        None, description="How long the last start from zero took, and for what."
    )
    demand: DemandStatus | None = Field(
        None, description="What arrives and what one replica serves of it, where servers count arrivals."
    )
    gpu_hours: GpuHoursStatus | None = Field(None, description="Only with autoscaling.maxGPUHoursPerDay.")
    capacity: CapacityStatus | None = Field(None, description="For a restarted operator; only with autoscaling.")
    signals: list[SignalStatus] = Field(
        default_factory=list, max_length=8, description="What is scaled on, with its thresholds; only with autoscaling."
    )
    decisions: list[DecisionStatus] = Field(
        default_factory=list, max_length=MAX_DECISIONS, description="The last decisions, newest first."
    )


class AdapterStatus(SchemaModel):
    name: str = Field(max_length=128, description="Its name in spec.adapters.")
    pods: int = Field(ge=0, description="Ready pods that serve it from its present URI.")
    version: str | None = Field(None, max_length=64, description="A hash of its files, once a pod has loaded them.")


class LLMServiceStatus(SchemaModel):
    model_config = ConfigDict(json_schema_extra={"description": "What the operator observed."})

    observed_generation: int = Field(0, ge=0, description="Generation of the spec that this status is about.")
    replicas: int = Field(0, ge=0, description="Pods that exist, ready or not.")
    ready_replicas: int = Field(0, ge=0, description="Pods that serve.")
    selector: str = Field("", max_length=512, description="Label selector of the pods, for the scale subresource.")
    url: str = Field("", max_length=512, description="OpenAI-compatible base URL inside the cluster.")
    model: ModelStatus | None = Field(None, description="The model's figures, and the progress of its download.")
    sizing: SizingStatus | None = Field(None, description="How many sequences fit, and the working.")
    autoscaling: AutoscalingStatus | None = Field(None, description="The load, and the decisions about it.")
    adapters: list[AdapterStatus] = Field(
        default_factory=list, max_length=64, description="The LoRA adapters, as pods report them."
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Ready, Progressing, Stalled, SizingValid, ScalingActive, SLOFeasible.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )

    def condition(self, kind: str) -> Condition | None:
        return next((condition for condition in self.conditions if condition.type == kind), None)
