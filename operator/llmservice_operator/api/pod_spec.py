"""The parts of `spec` that end up in the pod as they are: scheduling, labels, environment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, WithJsonSchema

from llmservice_operator.api.schema_model import OPEN_OBJECT, SchemaModel

Passed = Annotated[dict[str, Any], WithJsonSchema(OPEN_OBJECT)]
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
    affinity: Passed | None = Field(None, description="The pods' affinity, in Kubernetes' own shape.")
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


class PodTemplate(SchemaModel):
    labels: LabelMap = Field(
        default_factory=dict, max_length=32, description="Labels added to the pods; the operator's own win."
    )
    annotations: StringMap = Field(
        default_factory=dict, max_length=32, description="Annotations added to the pods; the operator's own win."
    )
    env: list[EnvVar] = Field(
        default_factory=list,
        max_length=64,
        description="Environment variables added to the server's container; proxies and CAs also to the download's.",
    )
    image_pull_secrets: list[PullSecret] = Field(
        default_factory=list, max_length=8, description="Secrets that the server's image is pulled with."
    )
