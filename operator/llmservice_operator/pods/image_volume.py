"""Whether the cluster took the image volume of an oci:// model."""

from __future__ import annotations

from llmservice_operator.api.spec import Manifest
from llmservice_operator.models.location import ModelLocation
from llmservice_operator.pods.pod import Trouble


def image_volume_trouble(location: ModelLocation, deployment: Manifest | None) -> Trouble | None:
    """An API server without the feature drops the volume and its mounts in silence, and the pods start without a model.

    `deployment` is as the API server keeps it; one of an earlier spec, which serves another path, tells nothing.
    """
    if location.image is None or deployment is None:
        return None
    pod = deployment["spec"]["template"]["spec"]
    if not any(location.path in (container.get("args") or []) for container in pod["containers"]):
        return None
    if any(volume["name"] == "models" for volume in pod.get("volumes") or []):
        return None
    return Trouble(
        "ImageVolumesUnsupported",
        f"the API server dropped the volume of oci://{location.image}: image volumes need Kubernetes 1.31 or newer with"
        " the feature gate ImageVolume (on by default from 1.35) and a container runtime that mounts images; until then"
        " use hf://, s3:// or pvc://",
    )
