"""The gateway's public keys in a service's pods, which then take only requests that the gateway has signed."""

from __future__ import annotations

from llmservice_operator.api.kinds import child_manifest
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest

PUBLIC_KEYS_FILE = "public-keys.pem"
_VOLUME = "gateway-keys"
_MOUNT = "/etc/llmservice/gateway"


def gateway_keys_name(service: LLMService) -> str:
    """At most 57 characters, for a service's name has at most 52."""
    return f"{service.name}-keys"


def expected_gateway_keys(service: LLMService, public_keys: str) -> Manifest:
    """The kubelet updates it in running pods, whose servers read it again: a rotation replaces no pod."""
    return child_manifest(service, "ConfigMap", gateway_keys_name(service)) | {"data": {PUBLIC_KEYS_FILE: public_keys}}


def gateway_key_args(service: LLMService) -> list[str]:
    """The server's flags."""
    return ["--gateway-keys", f"{_MOUNT}/{PUBLIC_KEYS_FILE}", "--audience", f"{service.namespace}/{service.name}"]


def gateway_key_volume(service: LLMService) -> Manifest:
    return {"name": _VOLUME, "configMap": {"name": gateway_keys_name(service)}}


def gateway_key_mount() -> Manifest:
    return {"name": _VOLUME, "mountPath": _MOUNT, "readOnly": True}
