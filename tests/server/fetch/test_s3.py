from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from botocore.awsrequest import AWSPreparedRequest

from harness.stores.credential_server import KEY_ID, ROLE, TOKEN, credential_server
from harness.stores.file_server import Fault
from harness.stores.object_store import ObjectStore
from llmservice_local.node.server import self_signed
from llmservice_server.fetch.checkpoint import fetch
from llmservice_server.fetch.download import FetchOptions
from llmservice_server.fetch.s3 import S3Source, _digest
from llmservice_server.fetch.source import Digest, FetchError

WEIGHTS = "model.safetensors"
URI = "s3://models/llms/tiny"
MD5 = "0123456789abcdef" * 2
SHA256 = sha256(b"content").digest()

Fetched = Callable[[str], dict[str, bytes]]


def test_a_folder_of_a_bucket_is_fetched_page_by_page(store: ObjectStore, fetched: Fetched) -> None:
    found = fetched(URI)
    assert sorted(found) == ["chat_template.jinja", "config.json", WEIGHTS, "tokenizer.json"]
    assert found[WEIGHTS] == store.objects[f"llms/tiny/{WEIGHTS}"]
    assert sum(request.path == "/models" for request in store.seen) > 1
    assert all("SignedHeaders=" in (request.authorization or "") for request in store.seen)
    assert "s3-secret" not in repr(store.seen)


def test_an_interrupted_object_is_continued(store: ObjectStore, fetched: Fetched) -> None:
    key = f"llms/tiny/{WEIGHTS}"
    store.faults[key] = [Fault(cut_after=200_000)]
    assert fetched(URI)[WEIGHTS] == store.objects[key]
    ranges = [request.range for request in store.seen if request.path.endswith(WEIGHTS) and request.method == "GET"]
    assert ranges == [None, "bytes=200000-"]


def test_a_corrupt_object_is_downloaded_again(store: ObjectStore, fetched: Fetched) -> None:
    store.faults[f"llms/tiny/{WEIGHTS}"] = [Fault(cut_after=10_000), Fault(corrupt=True)]
    assert fetched(URI)[WEIGHTS] == store.objects[f"llms/tiny/{WEIGHTS}"]


def test_without_a_checksum_a_file_counts_only_as_the_recorded_version(
    store: ObjectStore, fetched: Fetched, tmp_path: Path
) -> None:
    key, store.in_parts = f"llms/tiny/{WEIGHTS}", True
    for content in (store.objects[key], b"WEIGHTS" * 40_000):
        store.objects[key] = content
        store.faults["llms/tiny/config.json"] = [Fault(status=503)]
        with pytest.raises(FetchError, match="HTTP 503"):
            fetch(URI, tmp_path / "model", FetchOptions(parallel=1, attempts=1))
    store.sent.clear()
    assert fetched(URI)[WEIGHTS] == store.objects[key]
    assert store.sent["llms/tiny/config.json"]
    assert not store.sent[key]


@pytest.mark.slow
def test_a_store_that_stops_sending_is_reported(store: ObjectStore, fetched: Fetched) -> None:
    store.faults[f"llms/tiny/{WEIGHTS}"] = [Fault(cut_after=0, silent=True)] * 3
    with pytest.raises(FetchError, match=r"connection to 127.0.0.1:\d+ failed \(ReadTimeoutError\) \(3 attempts"):
        fetched(URI)


@pytest.mark.parametrize("status", [425, 429, 500, 503])
def test_a_temporary_error_is_retried(store: ObjectStore, fetched: Fetched, status: int) -> None:
    store.faults[f"llms/tiny/{WEIGHTS}"] = [Fault(status=status)]
    assert fetched(URI)[WEIGHTS] == store.objects[f"llms/tiny/{WEIGHTS}"]


@pytest.fixture
def credentials(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store that takes only the keys of the credential server, whose URL this is."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store.key_id = KEY_ID
    with credential_server() as url:
        yield url


def _is_signed_with_the_session(store: ObjectStore) -> bool:
    return all("x-amz-security-token" in (request.authorization or "") for request in store.seen)


def _web_identity(credentials: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str = TOKEN) -> None:
    """What EKS sets for a service account with a role (IRSA)."""
    (tmp_path / "token").write_text(token)
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", credentials)


def test_a_service_accounts_role_reads_the_bucket(
    store: ObjectStore, credentials: str, fetched: Fetched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _web_identity(credentials, tmp_path, monkeypatch)
    assert WEIGHTS in fetched(URI)
    assert _is_signed_with_the_session(store)


@pytest.mark.usefixtures("store")
def test_a_role_that_does_not_trust_the_service_account_is_reported(
    credentials: str, fetched: Fetched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _web_identity(credentials, tmp_path, monkeypatch, token="another-token")
    with pytest.raises(FetchError, match=r"gives no credentials for the role \(AccessDenied\)") as refused:
        fetched(URI)
    assert "another-token" not in str(refused.value)


def test_a_nodes_role_reads_the_bucket(
    store: ObjectStore, credentials: str, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", credentials)
    assert WEIGHTS in fetched(URI)
    assert _is_signed_with_the_session(store)


def test_a_containers_role_reads_the_bucket(
    store: ObjectStore, credentials: str, fetched: Fetched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{credentials}/container")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    assert WEIGHTS in fetched(URI)
    assert _is_signed_with_the_session(store)


@pytest.mark.parametrize("profile", ["keys", "role"])
def test_a_shared_profile_reads_the_bucket(
    store: ObjectStore,
    credentials: str,
    fetched: Fetched,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    profile: str,
) -> None:
    (tmp_path / "credentials").write_text(
        f"[keys]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = secret\naws_session_token = session\n"
        f"[role]\nrole_arn = {ROLE}\nsource_profile = keys\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", profile)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", credentials)
    assert WEIGHTS in fetched(URI)
    assert _is_signed_with_the_session(store)


def test_a_profile_that_does_not_exist_is_reported(
    store: ObjectStore, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(
        FetchError, match=r"profile \(absent\) could not be found: check the AWS_\* variables and files"
    ):
        fetched(URI)
    assert store.seen == []


def test_a_public_bucket_needs_no_credentials(
    store: ObjectStore, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store.key_id = None
    assert WEIGHTS in fetched(URI)
    assert all(request.authorization is None for request in store.seen)


def test_white_space_around_keys_is_removed(
    store: ObjectStore, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", " AKIDEXAMPLE\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3-secret\n")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session\n")
    assert WEIGHTS in fetched(URI)
    source = S3Source.parse("models/a", 1.0)
    keys = source.client._request_signer._credentials
    assert (keys.access_key, keys.secret_key, keys.token) == ("AKIDEXAMPLE", "s3-secret", "session")


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_a_key_that_no_header_can_have_is_refused(
    store: ObjectStore, fetched: Fetched, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "clé")
    monkeypatch.setenv("LLMSERVICE_SECRET", "bucket-access")
    with pytest.raises(FetchError, match=f"^key {name} of Secret bucket-access has characters that are not") as refused:
        fetched(URI)
    assert "clé" not in str(refused.value)
    assert store.seen == []


def test_wrong_credentials_name_the_secret(
    store: ObjectStore, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOTHER")
    monkeypatch.setenv("LLMSERVICE_SECRET", "bucket-access")
    with pytest.raises(FetchError, match=r"closed to the credentials of Secret bucket-access \(InvalidAccessKeyId\)"):
        fetched(URI)
    assert len(store.seen) == 1


@pytest.mark.usefixtures("store")
def test_a_closed_bucket_asks_for_credentials(fetched: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(FetchError, match=r"is not public \(AccessDenied\): name a Secret in spec.model.s3"):
        fetched(URI)


@pytest.mark.usefixtures("store")
def test_a_bucket_in_another_region_is_read(fetched: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-west-9")
    assert WEIGHTS in fetched(URI)


@pytest.mark.slow
@pytest.mark.parametrize("trusted", [True, False])
def test_the_certificates_in_ssl_cert_file_are_trusted(
    store: ObjectStore, fetched: Fetched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    context = asyncio.run(self_signed(tmp_path, "store"))
    with ObjectStore(store.objects).serving(context) as secure:
        monkeypatch.setenv("AWS_ENDPOINT_URL", secure.url)
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "store.crt"))
            assert WEIGHTS in fetched(URI)
        else:
            with pytest.raises(FetchError, match="SSLError"):
                fetched(URI)


@pytest.mark.parametrize(
    ("environment", "bucket", "url"),
    [
        ({}, "models", "https://models.s3.us-east-1.amazonaws.com/?"),
        ({"AWS_REGION": "eu-west-1"}, "my.models", "https://s3.eu-west-1.amazonaws.com/my.models?"),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "models", "https://models.s3.eu-west-1.amazonaws.com/?"),
        ({"AWS_ENDPOINT_URL": "http://minio:9000/"}, "models", "http://minio:9000/models?"),
        ({"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"}, "models", "http://b/models?"),
    ],
)
@pytest.mark.usefixtures("no_aws")
def test_the_address_of_a_bucket(
    environment: dict[str, str], bucket: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(request: AWSPreparedRequest, **_: object) -> None:
        raise RuntimeError(request.url)

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    source = S3Source.parse(f"{bucket}/a", 1.0)
    source.client.meta.events.register("before-send", stop)
    with pytest.raises(RuntimeError, match=re.escape(url)):
        source.names()


@pytest.mark.usefixtures("no_aws")
def test_half_of_a_key_pair_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    with pytest.raises(FetchError, match="Partial credentials found in env, missing: AWS_SECRET_ACCESS_KEY"):
        S3Source.parse("models/a", 1.0)


@pytest.mark.parametrize(
    ("head", "digest"),
    [
        ({"ETag": f'"{MD5}"'}, Digest("md5", MD5)),
        ({"ETag": f'"{MD5}-3"'}, None),  # uploaded in parts
        ({"ETag": f'"{MD5}"', "ServerSideEncryption": "AES256"}, Digest("md5", MD5)),
        ({"ETag": f'"{MD5}"', "ServerSideEncryption": "aws:kms"}, None),
        ({"ETag": f'"{MD5}-3"', "ChecksumSHA256": b64encode(SHA256).decode()}, Digest("sha256", SHA256.hex())),
        ({"ETag": f'"{MD5}-3"', "ChecksumSHA256": f"{b64encode(SHA256).decode()}-3"}, None),
        ({"ETag": '"opaque"'}, None),
    ],
)
def test_only_a_checksum_of_the_whole_object_is_used(head: dict[str, str], digest: Digest | None) -> None:
    assert _digest(head) == digest


def test_a_path_with_unusual_characters(store: ObjectStore, fetched: Fetched) -> None:
    store.objects = {key.replace("tiny", "a b+c=d"): content for key, content in store.objects.items()}
    assert WEIGHTS in fetched("s3://models/llms/a b+c=d")
    assert f"/models/llms/a%20b%2Bc%3Dd/{WEIGHTS}" in {request.target for request in store.seen}
