"""`spec.resources` and `spec.engine` of an LLMService: the GPU or CPU of a replica, and how its server uses it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from llmservice_operator.api.schema_model import SchemaModel, rules
from llmservice_operator.api.units import Quantity
from llmservice_planner.sizing.overhead import PROCESS_BYTES

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
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8"] = Field(
        "auto", description="Type of the KV cache: auto is the model's; fp8 needs a GPU that has it (L4, H100, newer)."
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
