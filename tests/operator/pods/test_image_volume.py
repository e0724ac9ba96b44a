from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.models.location import ModelLocation
from llmservice_operator.pods.image_volume import image_volume_trouble

OCI = ModelLocation("oci", "/models", image="ghcr.io/org/m:1")
VOLUME = {"name": "models", "image": {"reference": "ghcr.io/org/m:1"}}


def _deployment(model: str, volumes: list[dict[str, Any]]) -> dict[str, Any]:
    containers = [{"name": "server", "args": ["serve", "--model", model]}]
    return {"spec": {"template": {"spec": {"containers": containers, "volumes": volumes}}}}


@pytest.mark.parametrize(
    ("location", "deployment"),
    [
        (OCI, None),
        (OCI, _deployment("/models", [VOLUME])),
        (OCI, _deployment("/srv/earlier/model", [])),
        (ModelLocation("file", "/srv/models/tiny"), _deployment("/srv/models/tiny", [])),
    ],
)
def test_a_volume_that_is_there_or_not_asked_for_is_no_trouble(location: ModelLocation, deployment: Any) -> None:
    assert image_volume_trouble(location, deployment) is None


def test_a_volume_that_the_api_server_dropped_is_told_with_what_it_takes() -> None:
    trouble = image_volume_trouble(OCI, _deployment("/models", [{"name": "tmp", "emptyDir": {}}]))
    assert trouble is not None
    assert trouble.reason == "ImageVolumesUnsupported"
    assert "oci://ghcr.io/org/m:1" in trouble.message
    assert "feature gate ImageVolume" in trouble.message
