"""CustomResourceDefinitions of other projects' kinds."""

from __future__ import annotations

from typing import Any

from llmservice_local.kinds.crd import APPROVAL

ANYTHING: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def definition(group: str, kind: str, schema: dict[str, Any] = ANYTHING) -> dict[str, Any]:
    """Of v1, with a status; a group of Kubernetes' own needs the annotation."""
    plural = f"{kind.lower()}s"
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    version["subresources"] = {"status": {}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": {APPROVAL: "unapproved, a test's own"}},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }
