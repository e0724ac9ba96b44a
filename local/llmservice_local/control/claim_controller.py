"""Binds every PersistentVolumeClaim to a folder of the node, which is all the storage that there is."""

from __future__ import annotations

from typing import Any

from llmservice_local.client import CLAIMS, PODS
from llmservice_local.control.controller import Controller
from llmservice_local.control.scheduling import claims_of

Object = dict[str, Any]
_PROTECTION = "kubernetes.io/pvc-protection"


class ClaimController(Controller):
    """What a provisioner, the binder and the protection of claims in use do elsewhere."""

    name = "persistentvolume-binder"
    watches = (CLAIMS, PODS)

    async def reconcile(self) -> float | None:
        for claim in self.informer(CLAIMS):
            if "deletionTimestamp" in claim["metadata"]:
                await self._let_go(claim)
            elif (claim.get("status") or {}).get("phase") != "Bound":
                await self._bind(claim)
        return None

    async def _bind(self, claim: Object) -> None:
        spec = claim["spec"]
        capacity = (spec.get("resources") or {}).get("requests") or {}
        status = {"phase": "Bound", "accessModes": spec.get("accessModes") or [], "capacity": capacity}
        self.informer(CLAIMS).observe(await self.client.merge(CLAIMS, claim, {"status": status}, subresource="status"))

    async def _let_go(self, claim: Object) -> None:
        """A claim that a pod still mounts stays until that pod is gone."""
        metadata = claim["metadata"]
        finalizers = metadata.get("finalizers") or []
        used = any(
            metadata["name"] in claims_of(pod)
            for pod in self.informer(PODS)
            if pod["metadata"]["namespace"] == metadata["namespace"]
        )
        if _PROTECTION in finalizers and not used:
            rest = [name for name in finalizers if name != _PROTECTION]
            await self.client.merge(CLAIMS, claim, {"metadata": {"finalizers": rest}})
