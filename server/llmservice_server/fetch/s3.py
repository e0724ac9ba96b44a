"""`s3://bucket/prefix`: a folder of a bucket on AWS, or on another server with the S3 API (MinIO, Ceph, R2 …)."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as ConnectionFailedError
from botocore.parsers import ResponseParserError

from llmservice_server.fetch.source import (
    CorruptError,
    Digest,
    FetchError,
    RemoteFile,
    RetryableError,
    first_byte,
    header_value,
    is_transient,
)

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MD5 = re.compile(r"[0-9a-f]{32}")
_CONNECT_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 32
_CHUNK_BYTES = 1 << 17
_KEYS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"


@dataclass(frozen=True, slots=True)
class S3Source:
    """A folder of a bucket. botocore finds the credentials, signs, follows the bucket's region and parses."""

    bucket: str
    prefix: str
    """Ends in a slash, or is empty."""
    client: Any
    credentials_from: str | None
    """Where the credentials come from, for messages. None: requests are not signed, for public buckets."""

    @classmethod
    def parse(cls, path: str, silence_s: float) -> S3Source:
        """From what follows `s3://`, AWS's variables and files, and LLMSERVICE_SECRET. Raises FetchError."""
        bucket, _, prefix = path.partition("/")
        if not _BUCKET.fullmatch(bucket) or not prefix.isprintable():
            raise FetchError(f"s3://{path} names no bucket, expected s3://bucket/path/to/model")
        env = os.environ.get
        endpoint = env("AWS_ENDPOINT_URL_S3") or env("AWS_ENDPOINT_URL")
        if endpoint and urlsplit(endpoint).scheme not in {"http", "https"}:
            raise FetchError(f"the S3 endpoint is {endpoint}, expected http://host[:port] or https://host[:port]")
        try:
            session = botocore.session.get_session()
            region = env("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
            session.set_config_variable("region", region)
            session.set_config_variable("ca_bundle", env("AWS_CA_BUNDLE") or env("SSL_CERT_FILE"))
            credentials = session.get_credentials()
            if credentials and credentials.method == "env":
                _strip_keys(session, credentials)
            config = Config(
                signature_version="s3v4" if credentials else UNSIGNED,
                s3={
                    "addressing_style": "path" if endpoint else "auto",
                    "us_east_1_regional_endpoint": "regional",
                },
                retries={"mode": "standard", "total_max_attempts": 1},  # the download repeats requests
                response_checksum_validation="when_required",  # the download compares checksums
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=silence_s,
                max_pool_connections=_MAX_CONNECTIONS,
            )
            client = session.create_client("s3", endpoint_url=endpoint or None, config=config)
        except BotoCoreError as error:
            raise FetchError(f"s3://{path}: {error}: check the AWS_* variables and files") from error
        secret, found = env("LLMSERVICE_SECRET"), credentials.method if credentials else None
        return cls(
            bucket,
            f"{prefix.strip('/')}/" if prefix.strip("/") else "",
            client,
            f"Secret {secret}" if secret and found == "env" else _KEYS if found == "env" else found,
        )

    @property
    def where(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def names(self) -> list[str]:
        with self._explained("the list of files"):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix, Delimiter="/"
            )
            keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
        found = [key.removeprefix(self.prefix) for key in keys if key != self.prefix]
        if not found:
            raise FetchError(f"{self.where} holds nothing: check bucket and path")
        return found

    def describe(self, names: list[str]) -> list[RemoteFile]:
        return [self._described(name) for name in names]

    @contextmanager
    def open(self, file: RemoteFile, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        content_range = {"Range": f"bytes={start}-"} if start else {}
        with self._explained(file.name):
            response = self.client.get_object(
                Bucket=self.bucket, Key=self.prefix + file.name, IfMatch=file.version, **content_range
            )
            with (body := response["Body"]):
                yield first_byte(response.get("ContentRange"), start), body.iter_chunks(_CHUNK_BYTES)

    def _described(self, name: str) -> RemoteFile:
        with self._explained(name):
            response = self.client.head_object(Bucket=self.bucket, Key=self.prefix + name, ChecksumMode="ENABLED")
        size, etag = response.get("ContentLength"), response.get("ETag")
        if size is None or not etag:
            raise FetchError(f"{self.where}: the store states no size or ETag of {name}: it has no S3 API")
        return RemoteFile(name, size, etag, _digest(response))

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Convert botocore's errors to ours, which state what to do."""
        try:
            yield
        except ClientError as error:
            raise self._converted(error, what) from error
        except ResponseParserError as error:
            raise FetchError(f"{self._host} does not respond as S3 does: check spec.model.s3.endpoint") from error
        except (ConnectionFailedError, HTTPClientError, IncompleteReadError) as error:
            raise RetryableError(f"the connection to {self._host} failed ({type(error).__name__})") from error
        except BotoCoreError as error:
            raise FetchError(f"{self.where}: {error}: check the AWS_* variables and files") from error

    @property
    def _host(self) -> str:
        return str(urlsplit(self.client.meta.endpoint_url).netloc)

    def _converted(self, error: ClientError, what: str) -> Exception:
        status, code = error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"].get("Code", "")
        if is_transient(status):
            return RetryableError(f"HTTP {status}")
        if status == 416:
            return CorruptError("the requested range is beyond its end")
        if error.operation_name.startswith("AssumeRole"):
            return FetchError(f"{self.where}: AWS gives no credentials for the role ({code}): check its trust policy")
        if status == 412:
            return FetchError(f"{self.where}: {what} was replaced during the download: the next attempt reads it again")
        if code == "NoSuchBucket":
            return FetchError(f"there is no bucket {self.bucket}: check model.uri and model.s3.endpoint")
        return FetchError(f"{self.where} {self._refusal(status, code, what)}")

    def _refusal(self, status: int, code: str, what: str) -> str:
        if status not in {401, 403}:
            return f"cannot be read: the store returns {status} {code} for {what}: check spec.model.s3"
        if self.credentials_from is None:
            return f"is not public ({code}): name a Secret in spec.model.s3.credentialsSecretRef"
        needs = "they need s3:GetObject and s3:ListBucket on it"
        return f"is closed to the credentials of {self.credentials_from} ({code}): {needs}"


def _strip_keys(session: botocore.session.Session, found: Credentials) -> None:
    """Of the keys that are `found` in the environment. Raises FetchError."""
    secret = os.environ.get("LLMSERVICE_SECRET")
    keys = {
        "AWS_ACCESS_KEY_ID": found.access_key,
        "AWS_SECRET_ACCESS_KEY": found.secret_key,
        "AWS_SESSION_TOKEN": found.token or "",
    }
    stripped = [header_value(key, f"key {name} of Secret {secret}" if secret else name) for name, key in keys.items()]
    if stripped != [*keys.values()]:
        session.set_credentials(*stripped)


def _digest(head: Mapping[str, Any]) -> Digest | None:
    """The stored SHA-256 if it is of the whole object, else the ETag if it is the content's MD5."""
    try:
        sha256 = base64.b64decode(head.get("ChecksumSHA256", ""), validate=True).hex()
    except binascii.Error:  # of parts: "…-3"
        sha256 = ""
    if len(sha256) == 64:
        return Digest("sha256", sha256)
    etag = head.get("ETag", "").strip('"')
    keyed = head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head
    return Digest("md5", etag) if _MD5.fullmatch(etag) and not keyed else None
