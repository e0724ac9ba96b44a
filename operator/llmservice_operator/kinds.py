"""The kinds that the operator follows: watched by kopf, listed by the resync, kept in the object cache."""

from __future__ import annotations

from dataclasses import dataclass

from llmservice_operator import labels
from llmservice_operator.child import CHILD_KINDS, ChildKind
from llmservice_operator.resource import API_VERSION, KIND, MANAGER, PLURAL


@dataclass(frozen=True, slots=True)
class Followed:
    """A kind, and the labels by which the API server selects what concerns the operator."""

    kind: ChildKind
    selector: str = f"{labels.MANAGED_BY}={MANAGER}"

    def path(self, namespace: str | None) -> str:
        """The collection's URL: of one namespace, or of the whole cluster."""
        api_version, plural = self.kind.api_version, self.kind.plural
        root = f"/apis/{api_version}" if self.kind.group else f"/api/{api_version}"
        return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


FOLLOWED = (
    Followed(ChildKind(API_VERSION, KIND, PLURAL), selector=""),
    Followed(ChildKind("v1", "Pod", "pods")),
    *(Followed(kind) for kind in CHILD_KINDS.values()),
)
