from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256

import pytest

from harness.file_server import Fault
from harness.object_store import ObjectStore
from llmservice_server.fetch.error import FetchError
from llmservice_server.fetch.s3 import S3Source, _digest
from llmservice_server.fetch.source import Digest

WEIGHTS = "model.safetensors"
URI = "s3://models/llms/tiny"
MD5 = "0123456789abcdef" * 2
SHA256 = sha256(b"content").digest()

Fetched = Callable[[str], dict[str, bytes]]


def test_a_folder_of_a_bucket_is_fetched_page_by_page(store: ObjectStore, fetched: Fetched) -> None:
    found = fetched(URI)
    assert sorted(found) == ["chat_template.jinja", "config.json", WEIGHTS, "tokenizer.json"]
    assert found[WEIGHTS] == store.objects[f"llms/tiny/{WEIGHTS}"]
    assert sum(asked.path == "/models/" for asked in store.seen) > 1
    assert all("SignedHeaders=" in (asked.authorization or "") for asked in store.seen)
    assert "s3-secret" not in repr(store.seen)


def test_a_public_bucket_needs_no_credentials(
    store: ObjectStore, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store.key_id = None
    assert WEIGHTS in fetched(URI)
    assert all(asked.authorization is None for asked in store.seen)


def test_an_object_is_continued_and_checked(store: ObjectStore, fetched: Fetched) -> None:
    store.faults[f"llms/tiny/{WEIGHTS}"] = [Fault(cut_after=10_000), Fault(corrupt=True)]
    assert fetched(URI)[WEIGHTS] == store.objects[f"llms/tiny/{WEIGHTS}"]


def test_wrong_credentials_name_the_secret(
    store: ObjectStore, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOTHER")
    monkeypatch.setenv("LLMSERVICE_SECRET", "bucket-access")
    with pytest.raises(FetchError, match=r"closed to the credentials of Secret bucket-access \(InvalidAccessKeyId\)"):
        fetched(URI)


def test_a_closed_bucket_asks_for_credentials(
    store: ObjectStore, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(FetchError, match=r"is not public \(AccessDenied\): name a Secret in spec.model.s3"):
        fetched(URI)


def test_a_wrong_region_names_the_right_one(
    store: ObjectStore, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "us-west-9")
    with pytest.raises(FetchError, match=r"is in region eu-test-1, not us-west-9: set model.s3.region"):
        fetched(URI)


@pytest.mark.parametrize(
    ("environment", "path", "url"),
    [
        ({}, "models/a", "https://models.s3.us-east-1.amazonaws.com"),
        ({"AWS_REGION": "eu-west-1"}, "my.models/a", "https://s3.eu-west-1.amazonaws.com/my.models"),
        ({"AWS_ENDPOINT_URL": "http://minio:9000/"}, "models/a", "http://minio:9000/models"),
    ],
)
def test_a_bucket_is_asked_where_it_lives(
    environment: dict[str, str], path: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert S3Source.parse(path)._base == url


def test_half_of_a_key_pair_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    with pytest.raises(FetchError, match="give both or neither"):
        S3Source.parse("models/a")


@pytest.mark.parametrize(
    ("headers", "digest"),
    [
        ({"etag": f'"{MD5}"'}, Digest("md5", MD5)),
        ({"etag": f'"{MD5}-3"'}, None),  # uploaded in parts
        ({"etag": f'"{MD5}"', "x-amz-server-side-encryption": "AES256"}, Digest("md5", MD5)),
        ({"etag": f'"{MD5}"', "x-amz-server-side-encryption": "aws:kms"}, None),
        ({"etag": f'"{MD5}-3"', "x-amz-checksum-sha256": b64encode(SHA256).decode()}, Digest("sha256", SHA256.hex())),
        ({"etag": f'"{MD5}-3"', "x-amz-checksum-sha256": f"{b64encode(SHA256).decode()}-3"}, None),
        ({"etag": '"opaque"'}, None),
    ],
)
def test_only_what_is_a_checksum_of_the_whole_is_taken_for_one(headers: dict[str, str], digest: Digest | None) -> None:
    assert _digest(headers) == digest


def test_a_path_with_unusual_characters_is_asked_for_as_it_was_signed(store: ObjectStore, fetched: Fetched) -> None:
    store.objects = {key.replace("tiny", "a b+c=d"): content for key, content in store.objects.items()}
    assert WEIGHTS in fetched("s3://models/llms/a b+c=d")
    assert f"/models/llms/a%20b%2Bc%3Dd/{WEIGHTS}" in {asked.target for asked in store.seen}
