"""Names and times of a manifest; that the API server accepts it is tested with the CRD."""

from __future__ import annotations

import pytest

from llmservice_planner.capacity.manifest import duration, service_name


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("hf://meta-llama/Llama-3.1-8B-Instruct", "llama-3-1-8b-instruct"),
        ("hf://org/name@v1.0", "name"),
        ("s3://bucket/path/Qwen2.5_7B/", "qwen2-5-7b"),
        ("oci://registry/image:tag#models/poet", "image-tag"),
        ("file:///models/___", "model"),
        ("file:///models/8b", "model-8b"),
        ("hf://org/" + "long-" * 30, ("long-" * 8)[:-1]),
    ],
)
def test_service_is_named_after_its_model(uri: str, name: str) -> None:
    assert service_name(uri) == name


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.0, "1s"), (2.5, "2500ms"), (0.05, "50ms"), (0.0125, "12.5ms"), (60.0, "60s"), (0.1 + 0.2, "300ms")],
)
def test_times_are_written_as_the_crd_reads_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
