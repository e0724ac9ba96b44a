"""Secrets, and environment variables that redirect the server, need a grant of the platform.

A Namespace's annotation lists its usable Secrets. A user who may write LLMServices but not read Secrets could otherwise
have one mounted into a container of their choice.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import quote

from llmservice_operator.api import labels
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import LLMServiceSpec
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.pods.pod import Trouble

EVERY_SECRET = "*"  # noqa: S105 - no secret
GUARDED = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "LD_*", "*_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "OTEL_*ENDPOINT", "OTEL_*HEADERS",
)  # fmt: skip
"""Variables that decide which code the server runs, and which hosts it connects to or trusts."""

_REFERENCE = re.compile(r"secret|azureFile|.*[sS]ecret(Key)?Ref")
"""Keys, in Kubernetes' own shapes, whose object names a Secret."""
_KEEP_S = 60.0
_PARTS: Any = {"model": True, "pod_template": {"env", "env_from", "volumes", "sidecars"}}


@dataclass(slots=True)
class Grants:
    """Decides by the Namespaces' annotations, read when a spec names a Secret, and by the operator's flags."""

    client: KubeClient
    reads_namespaces: bool = True
    """False: the operator's role does not include Namespaces, so that only `usable_secrets` counts."""
    usable_secrets: Mapping[str, Collection[str]] = field(default_factory=dict)
    """By namespace, in addition to the annotation."""
    environment: Collection[str] = ()
    """Names or patterns of guarded variables that are allowed."""
    clock: Callable[[], float] = time.monotonic
    _annotated: dict[str, tuple[float, frozenset[str]]] = field(default_factory=dict)

    async def refusal(self, service: LLMService) -> Trouble | None:
        """Why no pod may be made of the spec; None where one may. Raises KubeError.

        An annotation that allows the spec is cached for a minute, one that does not is read again.
        """
        if refused := refused_environment(service.spec, self.environment):
            return refused
        named = list(named_secrets(service.spec))
        if not named:
            return None
        namespace = service.namespace
        usable = frozenset(self.usable_secrets.get(namespace, ())) | self._known(namespace)
        if _missing(named, usable) and self.reads_namespaces:
            annotated = await self._read(namespace)
            self._annotated[namespace] = (self.clock(), annotated)
            usable |= annotated
        return self._refused(namespace, named, usable)

    def _known(self, namespace: str) -> frozenset[str]:
        read_s, annotated = self._annotated.get(namespace, (0.0, frozenset()))
        return annotated if self.clock() - read_s < _KEEP_S else frozenset()

    def _refused(self, namespace: str, named: Sequence[tuple[str, str]], usable: frozenset[str]) -> Trouble | None:
        missing = _missing(named, usable)
        if not missing:
            return None
        which = "; ".join(f"{place} names the Secret {name}" for place, name in missing)
        names = ",".join(sorted({*usable, *(name for _, name in missing)}))
        remedy = (
            f"kubectl annotate namespace {namespace} --overwrite {labels.USABLE_SECRETS}={names}"
            if self.reads_namespaces
            else f"the administrator of the operator can set operator.usableSecrets.{namespace} to [{names}]"
        )
        return Trouble(
            "SecretNotAllowed", f"{which}, which LLMServices of the namespace {namespace} may not use: {remedy}"
        )

    async def _read(self, namespace: str) -> frozenset[str]:
        found = await self.client.find("GET", f"/api/v1/namespaces/{quote(namespace)}")
        if found is None:  # it is being deleted
            return frozenset()
        listed = (found["metadata"].get("annotations") or {}).get(labels.USABLE_SECRETS, "")
        return frozenset(name.strip() for name in listed.split(",") if name.strip())


def named_secrets(spec: LLMServiceSpec) -> Iterator[tuple[str, str]]:
    """Path and name of each Secret whose content reaches a pod; image pull secrets are used by the kubelet only."""
    yield from _named("spec", spec.model_dump(include=_PARTS, by_alias=True, exclude_none=True))


def refused_environment(spec: LLMServiceSpec, allowed: Collection[str]) -> Trouble | None:
    """The guarded variables that the spec sets without being allowed to; names are compared without their case."""
    names = [variable.name for variable in spec.pod_template.env]
    refused = [name for name in names if _matches(name, GUARDED) and not _matches(name, allowed)]
    if not refused:
        return None
    return Trouble(
        "EnvNotAllowed",
        f"spec.podTemplate.env sets {', '.join(refused)}, which decides what code the server runs or whom it talks to:"
        " leave it out, or ask the administrator of the operator to add it to operator.allowedEnv",
    )


def _named(path: str, value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        if _REFERENCE.fullmatch(key):  # both, since Kubernetes reads either
            yield from ((path, str(value[field])) for field in ("secretName", "name") if value.get(field))
        for inner, one in value.items():
            yield from _named(f"{path}.{inner}", one, str(inner))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _named(f"{path}[{index}]", one)


def _missing(named: Sequence[tuple[str, str]], usable: Collection[str]) -> list[tuple[str, str]]:
    return [] if EVERY_SECRET in usable else [(place, name) for place, name in named if name not in usable]


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name.upper(), pattern.upper()) for pattern in patterns)
