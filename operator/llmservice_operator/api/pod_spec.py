"""The parts of `spec` that are passed to the pod unchanged: scheduling, labels, environment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, WithJsonSchema

from llmservice_operator.api.model_spec import ObjectName
from llmservice_operator.api.schema_model import OPEN_OBJECT, SchemaModel, rules

_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"

Passed = Annotated[dict[str, Any], WithJsonSchema(OPEN_OBJECT)]
_NAME = {"type": "string", "maxLength": 63, "pattern": _LABEL, "description": "Its name within the pod."}
Named = Annotated[dict[str, Any], WithJsonSchema(OPEN_OBJECT | {"properties": {"name": _NAME}})]
"""Passed unchanged; rules check its name."""
_MOUNT_PATH = {"type": "string", "maxLength": 1024, "description": "Where the container sees the volume."}
Mounted = Annotated[dict[str, Any], WithJsonSchema(OPEN_OBJECT | {"properties": {"mountPath": _MOUNT_PATH}})]
"""Passed unchanged; a rule checks its path."""


def _with_field(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return OPEN_OBJECT | {"properties": {name: {"description": description, **schema}}}


_EXPRESSION = _with_field("key", {"type": "string", "maxLength": 317}, "The node's label.")
_EXPRESSIONS = {"type": "array", "maxItems": 64, "items": _EXPRESSION}
_TERM = _with_field("matchExpressions", _EXPRESSIONS, "What the labels of a node must be, all of it.")
_REQUIRED = _with_field(
    "nodeSelectorTerms", {"type": "array", "maxItems": 64, "items": _TERM}, "Alternatives, each with the GPU added."
)
_NODE_AFFINITY = _with_field(
    "requiredDuringSchedulingIgnoredDuringExecution", _REQUIRED, "Which nodes the pods may run on."
)
Affinity = Annotated[
    dict[str, Any], WithJsonSchema(_with_field("nodeAffinity", _NODE_AFFINITY, "By labels of the nodes."))
]
"""Passed unchanged, but for the GPU's labels, which are added to what is typed here."""
CountOrPercent = Annotated[
    int | str,
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": "^[0-9]{1,3}%$", "minimum": 0, "maxLength": 4}),
]
Text = Annotated[str, StringConstraints(max_length=1024)]
Key = Annotated[str, StringConstraints(max_length=317)]
StringMap = dict[Key, Text]
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$", max_length=63)]
LabelMap = dict[Key, LabelValue]


class Toleration(SchemaModel):
    key: str | None = Field(None, max_length=317, description="Taint key that is tolerated; absent: every key.")
    operator: Literal["Exists", "Equal"] | None = Field(None, description="How key and value are compared.")
    value: str | None = Field(None, max_length=63, description="Taint value that is tolerated.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Taint effect that is tolerated; absent: every effect."
    )
    toleration_seconds: int | None = Field(
        None, ge=0, le=31536000, description="How long a NoExecute taint is tolerated."
    )


class Scheduling(SchemaModel):
    node_selector: LabelMap = Field(
        default_factory=dict, max_length=32, description="Labels that a node must carry to run a replica."
    )
    tolerations: list[Toleration] = Field(
        default_factory=list, max_length=32, description="Taints that replicas tolerate, such as nvidia.com/gpu."
    )
    affinity: Affinity | None = Field(None, description="The pods' affinity, in Kubernetes' own shape.")
    priority_class_name: str | None = Field(None, max_length=253, description="PriorityClass of the pods.")
    runtime_class_name: str | None = Field(None, max_length=253, description="RuntimeClass of the pods.")
    topology_spread_constraints: list[Passed] = Field(
        default_factory=list,
        max_length=16,
        description="Spread of the pods, in Kubernetes' own shape; prefer ScheduleAnyway where GPUs are scarce.",
    )


class EnvVar(SchemaModel):
    name: str = Field(
        min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="Name of the variable."
    )
    value: str | None = Field(None, max_length=4096, description="Its value.")
    value_from: Passed | None = Field(
        None, description="Where the value comes from (secretKeyRef, configMapKeyRef, fieldRef), in Kubernetes' shape."
    )


class PullSecret(SchemaModel):
    name: str = Field(min_length=1, max_length=253, description="Name of an image pull secret in the namespace.")


class DisruptionBudget(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.maxUnavailable) != has(self.minAvailable)", "set maxUnavailable or minAvailable, not both")
        )
    )

    max_unavailable: CountOrPercent | None = Field(None, description="Pods that an eviction may take at a time.")
    min_available: CountOrPercent | None = Field(None, description="Pods that every eviction leaves.")


class ResourceClaim(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
                "set resourceClaimName or resourceClaimTemplateName, not both",
            )
        )
    )

    name: str = Field(min_length=1, max_length=63, pattern=_LABEL, description="What the pod calls the claim.")
    resource_claim_name: ObjectName | None = Field(None, description="A ResourceClaim that all pods share.")
    resource_claim_template_name: ObjectName | None = Field(
        None, description="A ResourceClaimTemplate, from which each pod gets a claim of its own."
    )


MANAGED_FLAGS = (
    "--model", "--served-model-name", "--port", "--metrics-port", "--max-model-len", "--max-num-seqs",
    "--default-lane", "--batch-order", "--kv-cache-memory", "--memory-limit", "--gpu-memory-utilization",
    "--drain-timeout", "--start-record", "--config-overrides", "--dtype", "--expected-tokens",
    "--max-num-batched-tokens", "--block-size", "--kv-cache-dtype", "--no-prefix-caching", "--swap-space-gib",
    "--threads", "--quantization", "--max-loras", "--max-lora-rank", "--lora-experts", "--adapters-file",
    "--adapters-dir", "--compile-cache", "--gateway-keys", "--audience",
)  # fmt: skip
"""Flags that the operator sets: `server_args` in children/deployment.py, from other fields of the spec."""
_SETS = "arg == flag || arg.startsWith(flag + '=')"
_VOLUMES = ["models", "tmp", "cache", "shm", "adapter-list", "adapters", "gateway-keys"]
MANAGED_MOUNTS = [
    "/models", "/tmp", "/cache", "/dev/shm", "/compiled-kernels", "/adapters",  # noqa: S108 - paths in a pod
    "/etc/llmservice/adapters", "/etc/llmservice/gateway",
]  # fmt: skip
"""Where the operator mounts volumes into the server's container."""
_IS_MOUNTED = f"one.mountPath in {MANAGED_MOUNTS}"


class PodTemplate(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"!has(self.extraArgs) || self.extraArgs.all(arg, !{list(MANAGED_FLAGS)}.exists(flag, {_SETS}))",
                "extraArgs can't hold a flag that the operator sets: set the field of the spec that it stands for",
            ),
            (
                "!has(self.sidecars) || self.sidecars.all(one, has(one.name) && !(one.name in ['server', 'fetch']))",
                "each of sidecars needs a name, and server and fetch are taken",
            ),
            (
                f"!has(self.volumes) || self.volumes.all(one, has(one.name) && !(one.name in {_VOLUMES}))",
                f"each of volumes needs a name, and {', '.join(_VOLUMES)} are taken",
            ),
            (
                f"!has(self.volumeMounts) || self.volumeMounts.all(one, has(one.mountPath) && !({_IS_MOUNTED}))",
                f"each of volumeMounts needs a mountPath, and {', '.join(MANAGED_MOUNTS)} are taken",
            ),
        )
    )

    image: str | None = Field(
        None, min_length=1, max_length=512, description="The server's image, instead of the chart's."
    )
    extra_args: list[Text] = Field(
        default_factory=list,
        max_length=32,
        description="More flags of `llmservice serve`, such as --batch-share=0.2; see its --help.",
    )
    env_from: list[Passed] = Field(
        default_factory=list,
        max_length=16,
        description="ConfigMaps and Secrets whose keys become the server's environment, in Kubernetes' own shape.",
    )
    volumes: list[Named] = Field(
        default_factory=list, max_length=16, description="More volumes of the pod, in Kubernetes' own shape."
    )
    volume_mounts: list[Mounted] = Field(
        default_factory=list, max_length=16, description="Where the server's container mounts them."
    )
    sidecars: list[Named] = Field(
        default_factory=list, max_length=8, description="More containers of the pod, in Kubernetes' own shape."
    )
    resource_claims: list[ResourceClaim] = Field(
        default_factory=list,
        max_length=8,
        description="Devices by dynamic resource allocation (Kubernetes 1.34+); the server's container gets them all.",
    )
    service_account_annotations: StringMap = Field(
        default_factory=dict,
        max_length=16,
        description="Annotations of the pods' ServiceAccount, as workload identity of a cloud wants them.",
    )
    disruption_budget: DisruptionBudget | None = Field(
        None, description="What an eviction leaves of the pods. Default: it takes one at a time."
    )
    labels: LabelMap = Field(
        default_factory=dict, max_length=32, description="Labels added to the pods; the operator's own win."
    )
    annotations: StringMap = Field(
        default_factory=dict, max_length=32, description="Annotations added to the pods; the operator's own win."
    )
    env: list[EnvVar] = Field(
        default_factory=list,
        max_length=64,
        description="Environment variables added to the server's container; proxies and CAs also to the download's."
        " Secrets need the Namespace's annotation; proxies, CAs, LD_* and the like the chart's operator.allowedEnv.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    image_pull_secrets: list[PullSecret] = Field(
        default_factory=list, max_length=8, description="Secrets that the server's image is pulled with."
    )
