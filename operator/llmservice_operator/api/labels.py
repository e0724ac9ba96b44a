"""Names that tie children, pods and metrics to their LLMService; see docs/architecture/contracts.md."""

from __future__ import annotations

from llmservice_operator.api.resource import GROUP, MANAGER

NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
MANAGED_BY = "app.kubernetes.io/managed-by"
PART_OF = "app.kubernetes.io/part-of"
"""The chart's own pods, gateway and operator, have it with the value `APP`."""

SERVED_NAME = f"{GROUP}/served-name"
MODEL = f"{GROUP}/model"
"""Annotation of a pod: the model that it was started with."""
TEMPLATE = f"{GROUP}/template"
"""Annotation of a pod: the hash of the pod template that it was made from."""
SIZING = f"{GROUP}/sizing"
"""Annotation of a Deployment: the `maxNumSeqs` that its pods were given, and whether it comes from measured blocks."""
USABLE_SECRETS = f"{GROUP}/usable-secrets"
"""Annotation of a Namespace: the Secrets that its LLMServices may name, separated by commas; * is all of them."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

APP = "llmservice"


GATEWAYS = f"{PART_OF}={APP},{COMPONENT}=gateway"
"""Selects the gateway's pods in the operator's own namespace."""


def selector_labels(instance: str) -> dict[str, str]:
    """The Deployment's selector; it is immutable, so it has nothing that may change."""
    return {NAME: APP, INSTANCE: instance}


def child_labels(instance: str) -> dict[str, str]:
    """The labels of every child and every pod."""
    return {**selector_labels(instance), COMPONENT: "server", MANAGED_BY: MANAGER}


def selector(instance: str) -> str:
    """The same selection as a string, for `status.selector` and list requests."""
    return ",".join(f"{key}={value}" for key, value in selector_labels(instance).items())
