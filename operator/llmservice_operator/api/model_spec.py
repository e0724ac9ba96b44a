"""`spec.model`: which checkpoint is served, where it is, and how a pod gets it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, WithJsonSchema

from llmservice_operator.api.schema_model import OPEN_OBJECT, SchemaModel, rules

ObjectName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", min_length=1, max_length=253)
]


class SecretRef(SchemaModel):
    name: ObjectName = Field(
        description="Name of a Secret in the same namespace whose key `token` holds the access token. The Namespace's"
        " annotation serving.llmservice.io/usable-secrets has to list it, like every Secret that a spec names."
    )


class CredentialsSecretRef(SchemaModel):
    name: ObjectName = Field(
        description="Name of a Secret in the same namespace with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,"
        " and AWS_SESSION_TOKEN where there is one."
    )


class S3(SchemaModel):
    """How a bucket is reached."""

    endpoint: str | None = Field(
        None,
        max_length=512,
        pattern=r"^https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?$",
        description="Base URL of a store that speaks S3, such as http://minio.storage:9000. Default: AWS.",
    )
    region: str | None = Field(
        None, min_length=1, max_length=64, pattern=r"^[a-z0-9-]+$", description="The bucket's region (us-east-1)."
    )
    credentials_secret_ref: CredentialsSecretRef | None = Field(
        None,
        description="Credentials of the bucket, for the init container alone; absent: it is public.",
    )


class ModelCache(SchemaModel):
    """A volume that pods share, so that a model is downloaded once for all of them."""

    claim_name: ObjectName = Field(
        description="A PersistentVolumeClaim of the namespace that all replicas can mount (ReadWriteMany)."
    )
    sub_path: str | None = Field(
        None,
        max_length=256,
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$",
        description="Folder of the volume that holds the cache; absent: the whole volume.",
    )


class Shape(SchemaModel):
    """The figures of a config.json that the memory arithmetic reads."""

    layers: int = Field(ge=1, le=1024, description="Number of decoder layers (num_hidden_layers).")
    heads: int = Field(ge=1, le=1024, description="Attention (query) heads (num_attention_heads).")
    kv_heads: int | None = Field(
        None, ge=1, le=1024, description="Key/value heads (num_key_value_heads). Default: as many as heads."
    )
    head_dim: int | None = Field(
        None, ge=1, le=1024, description="Width of one head (head_dim). Default: hiddenSize / heads."
    )
    hidden_size: int = Field(ge=1, le=1048576, description="Width of the residual stream (hidden_size).")
    intermediate_size: int = Field(ge=1, le=4194304, description="Width of the feed-forward layer (intermediate_size).")
    vocab_size: int = Field(ge=1, le=16777216, description="Number of tokens in the vocabulary (vocab_size).")
    max_position_embeddings: int | None = Field(
        None, ge=1, le=16777216, description="Longest context that the model was trained for."
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Type that the checkpoint is stored in (torch_dtype)."
    )
    sliding_window: int | None = Field(
        None, ge=1, le=16777216, description="Tokens that every layer looks back on, where the model has such a window."
    )
    tie_word_embeddings: bool = Field(
        False, description="Whether the input embedding is also the output head (tie_word_embeddings)."
    )


_MOST_LEVELS = 16


def _shallow(overrides: dict[str, Any]) -> dict[str, Any]:
    values: list[Any] = [overrides]
    for _ in range(_MOST_LEVELS):
        values = [inner for value in values if isinstance(value, dict | list) for inner in _inner(value)]
    if values:
        raise ValueError(f"configOverrides is nested in more than {_MOST_LEVELS} levels, which no config.json is")
    return overrides


def _inner(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


_DOWNLOADED = "(self.uri.startsWith('hf://') || self.uri.startsWith('s3://'))"


class ModelSource(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                r"self.uri.matches('^(hf://[^/]+/[^/]+|pvc://[a-z0-9]|s3://[^/]+|oci://[^/]+/[^/]|file:///[^/])')",
                "uri must be hf://org/name[@revision], s3://bucket/path, pvc://claim/path, oci://image or file:///path",
            ),
            (
                "!has(self.revision) || (self.uri.startsWith('hf://') && !self.uri.contains('@'))",
                "revision is for hf:// models whose uri names none with @",
            ),
            (
                "!has(self.secretRef) || self.uri.startsWith('hf://')",
                "secretRef holds the token of a hf:// model; s3:// takes s3.credentialsSecretRef",
            ),
            ("!has(self.s3) || self.uri.startsWith('s3://')", "s3 is for s3:// models"),
            (
                f"!has(self.cache) || {_DOWNLOADED}",
                "cache is for models that are downloaded (hf://, s3://): the others are mounted where they lie",
            ),
        )
    )

    uri: str = Field(
        min_length=7,
        max_length=1024,
        pattern=r"^[^\x00-\x1f\x7f]+$",
        description="Where the checkpoint is: hf://org/name[@revision], s3://bucket/path, pvc://claim/path,"
        " oci://registry/image[:tag][#path] (an image volume: Kubernetes 1.31+ with the feature gate"
        " ImageVolume) or file:///path.",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        description="Branch, tag or commit of a hf:// model (main). A commit is the only one that never moves.",
    )
    served_name: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/:-]*[A-Za-z0-9])?$",
        description="The name that clients put in `model`. Default: the service's name.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Type of weights and activations; auto takes the checkpoint's own."
    )
    quantization: Literal["auto", "dense", "int8", "stored"] = Field(
        "auto",
        description="What the server holds of the weights: as a quantised checkpoint stores them, where that is no"
        " slower (auto) or always (stored), in the dtype (dense), or int8, to which it quantises any checkpoint.",
    )
    config_overrides: Annotated[dict[str, Any], AfterValidator(_shallow), WithJsonSchema(OPEN_OBJECT)] | None = Field(
        None,
        description="Of the checkpoint's config.json, as a JSON merge patch (RFC 7396): such as rope_scaling, for"
        " contexts that YaRN stretches. null removes a key; `kubectl apply` sends it only with --server-side. A change"
        " replaces the pods.",
    )
    secret_ref: SecretRef | None = Field(
        None, description="Secret with the token for a gated model; reaches only the init container that downloads."
    )
    s3: S3 | None = Field(None, description="How the bucket of a s3:// model is reached.")
    cache: ModelCache | None = Field(
        None, description="A shared volume to download into. Absent: every pod downloads into one of its own."
    )
    shape: Shape | None = Field(
        None,
        description="The model's figures, where the operator can't read config.json before the pod runs (pvc://, s3://,"
        " oci://, gated models). Without them the server sizes itself.",
    )

    @property
    def identity(self) -> str:
        """Identifies the model: with another credential or cache it is still the same one."""
        named = self.uri if self.revision is None else f"{self.uri}@{self.revision}"
        return named if self.overrides_json is None else f"{named} {self.overrides_json}"

    @property
    def overrides_json(self) -> str | None:
        """Of `config_overrides`; None where nothing is changed."""
        return json.dumps(self.config_overrides, sort_keys=True) if self.config_overrides else None
