"""Names that tie children, pods and metrics to their LLMService; see ARCHITECTURE.md, "Contracts between the rooms"."""

from __future__ import annotations

from llmservice_operator.api.resource import GROUP, MANAGER

NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
MANAGED_BY = "app.kubernetes.io/managed-by"
PART_OF = "app.kubernetes.io/part-of"
"""What the chart's own pods, gateway and operator, carry with the value `APP`."""

SERVED_NAME = f"{GROUP}/served-name"
MODEL = f"{GROUP}/model"
"""Annotation of a pod: the model that it was started with."""
TEMPLATE = f"{GROUP}/template"
"""Annotation of a pod: the hash of the pod template that it was made from."""
USABLE_SECRETS = f"{GROUP}/usable-secrets"
"""Annotation of a Namespace: the Secrets that its LLMServices may name, separated by commas; * is all of them."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

APP = "llmservice"


def selector_labels(instance: str) -> dict[str, str]:
    """What a Deployment selects on; immutable, so it holds nothing that may change."""
    return {NAME: APP, INSTANCE: instance}


def child_labels(instance: str) -> dict[str, str]:
    """What every child and every pod carries."""
    return {**selector_labels(instance), COMPONENT: "server", MANAGED_BY: MANAGER}


def selector(instance: str) -> str:
    """The same selection as a string, for `status.selector` and list requests."""
    return ",".join(f"{key}={value}" for key, value in selector_labels(instance).items())
