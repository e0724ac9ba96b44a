from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.locations import ModelSourceError, locate

CACHE = {"cache": {"claimName": "models"}}


def source(uri: str, **fields: Any) -> ModelSource:
    return ModelSource.model_validate({"uri": uri, **fields})


@pytest.mark.parametrize(
    ("uri", "fields", "path"),
    [
        ("hf://org/name", {}, "/models/name"),
        ("hf://org/name@v1.0", {}, "/models/name"),
        ("hf://org/name", CACHE, "/models/hf/org/name@main"),
        ("hf://org/name", {**CACHE, "revision": "refs/pr/1"}, "/models/hf/org/name@refs%2Fpr%2F1"),
        ("s3://bucket/llms/tiny/", {}, "/models/tiny"),
        ("s3://bucket", {}, "/models/bucket"),
        ("s3://bucket/llms/tiny", CACHE, "/models/s3/aws/bucket/llms/tiny"),
        ("s3://bucket/a", {**CACHE, "s3": {"endpoint": "http://minio:9000"}}, "/models/s3/minio%3A9000/bucket/a"),
        ("pvc://claim", {}, "/models"),
        ("pvc://my-claim/some/model", {}, "/models/some/model"),
        ("oci://ghcr.io/org/model:v1", {}, "/models"),
        ("oci://ghcr.io/org/model:v1#weights/tiny", {}, "/models/weights/tiny"),
    ],
)
def test_a_uri_determines_the_location_in_the_pod(uri: str, fields: dict[str, Any], path: str) -> None:
    assert locate(source(uri, **fields), None).path == path


@pytest.mark.parametrize(
    ("uri", "fields", "fetched"),
    [
        ("hf://org/name", {}, "hf://org/name"),
        ("hf://org/name@v1", {}, "hf://org/name@v1"),
        ("hf://org/name", {"revision": "v2"}, "hf://org/name@v2"),
        ("s3://bucket/a b/c", {}, "s3://bucket/a b/c"),
        ("pvc://claim/a", {}, None),
        ("oci://host/image", {}, None),
    ],
)
def test_models_that_are_not_mounted_are_downloaded(uri: str, fields: dict[str, Any], fetched: str | None) -> None:
    assert locate(source(uri, **fields), None).fetch_uri == fetched


def test_claims_and_images_are_named() -> None:
    assert locate(source("pvc://weights/a"), None).claim == "weights"
    digest = f"oci://host:5000/a/b@sha256:{'0' * 64}"
    assert locate(source(digest), None).image == digest.removeprefix("oci://")


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("ftp://host/model", "InvalidURI"),
        ("s3://Bucket/model", "InvalidURI"),
        ("s3://bucket/../x", "InvalidURI"),
        ("s3://bucket/$(reboot)", "InvalidURI"),
        ("oci://registry", "InvalidURI"),
        ("oci://registry/model#../etc", "InvalidURI"),
        ("oci://registry/model --privileged", "InvalidURI"),
        ("hf://only-a-name", "InvalidURI"),
        ("hf://org/../name", "InvalidURI"),
        ("pvc://claim/../../etc", "InvalidURI"),
        ("pvc://Claim", "InvalidURI"),
        ("file:///tiny", "FileModelsDisabled"),
    ],
)
def test_a_uri_that_cannot_work_is_refused_with_a_reason(uri: str, reason: str) -> None:
    with pytest.raises(ModelSourceError) as refused:
        locate(source(uri), None)
    assert refused.value.reason == reason


@pytest.mark.parametrize("uri", ["file:///../secret", "file:///tiny/../../x", "file:///.", "file:////etc/passwd"])
def test_a_file_uri_never_leaves_its_root(uri: str, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()

    with pytest.raises(ModelSourceError) as refused:
        locate(source(uri), tmp_path)
    assert refused.value.reason == "InvalidURI"


def test_a_link_out_of_the_root_is_refused(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "link").symlink_to(tmp_path)

    with pytest.raises(ModelSourceError) as refused:
        locate(source("file:///link/elsewhere"), models)
    assert refused.value.reason == "InvalidURI"
