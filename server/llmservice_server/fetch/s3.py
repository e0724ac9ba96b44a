"""`s3://bucket/prefix`: a folder of a bucket, on AWS or on any server that speaks S3 (MinIO, Ceph, R2 …)."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit
from xml.etree import ElementTree

import httpx2

from llmservice_server.fetch.error import FetchError, RetryableError
from llmservice_server.fetch.sigv4 import Credentials, escaped, signed_headers
from llmservice_server.fetch.source import Digest, RemoteFile

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MD5 = re.compile(r"[0-9a-f]{32}")
_TIMEOUT = httpx2.Timeout(20.0)
_ANSWER_LIMIT_BYTES = 16 << 20
_SHA256 = "x-amz-checksum-sha256"


@dataclass(frozen=True, slots=True)
class S3Source:
    """A folder of a bucket. Without an endpoint it is AWS; with one, the bucket is the path's first part."""

    bucket: str
    prefix: str
    """Ends in a slash, or is empty."""
    region: str = "us-east-1"
    endpoint: str | None = None
    credentials: Credentials | None = None
    """None: requests are not signed, for public buckets."""
    credentials_from: str = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    @classmethod
    def parse(cls, path: str) -> S3Source:
        """From what follows `s3://`, with the AWS_* variables and LLMSERVICE_SECRET. Raises FetchError."""
        bucket, _, prefix = path.partition("/")
        if not _BUCKET.fullmatch(bucket) or not prefix.isprintable():
            raise FetchError(f"s3://{path} names no bucket, expected s3://bucket/path/to/model")
        env = os.environ.get
        key, secret_key, secret = env("AWS_ACCESS_KEY_ID"), env("AWS_SECRET_ACCESS_KEY"), env("LLMSERVICE_SECRET")
        if bool(key) != bool(secret_key):
            raise FetchError("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY go together: give both or neither")
        endpoint = env("AWS_ENDPOINT_URL_S3") or env("AWS_ENDPOINT_URL")
        if endpoint and urlsplit(endpoint).scheme not in {"http", "https"}:
            raise FetchError(f"the S3 endpoint is {endpoint}, expected http://host[:port] or https://host[:port]")
        return cls(
            bucket,
            f"{prefix.strip('/')}/" if prefix.strip("/") else "",
            region=env("AWS_REGION") or env("AWS_DEFAULT_REGION") or "us-east-1",
            endpoint=endpoint.rstrip("/") if endpoint else None,
            credentials=Credentials(key, secret_key, env("AWS_SESSION_TOKEN")) if key and secret_key else None,
            credentials_from=f"Secret {secret}" if secret else "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY",
        )

    @property
    def where(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def names(self) -> list[str]:
        found: list[str] = []
        token: str | None = None
        with httpx2.Client(timeout=_TIMEOUT) as client:
            while True:
                query = {"list-type": "2", "prefix": self.prefix, "delimiter": "/", "max-keys": "1000"}
                query |= {"continuation-token": token} if token else {}
                page = self._page(client, query)
                keys = [key.text or "" for key in page.iterfind("{*}Contents/{*}Key")]
                found += [key.removeprefix(self.prefix) for key in keys if key != self.prefix]
                token = page.findtext("{*}NextContinuationToken")
                if page.findtext("{*}IsTruncated") != "true" or not token:
                    break
        if not found:
            raise FetchError(f"{self.where} holds nothing: check bucket and path")
        return found

    def describe(self, names: list[str]) -> list[RemoteFile]:
        with httpx2.Client(timeout=_TIMEOUT) as client:
            return [self._described(client, name) for name in names]

    def headers(self, file: RemoteFile, extra: Mapping[str, str]) -> dict[str, str]:
        return self._signed("GET", file.url, {**extra, "If-Match": file.version})

    def refusal(self, status: int, name: str) -> FetchError:
        if status in {401, 403}:
            return self._forbidden("AccessDenied")
        if status == 412:
            return FetchError(f"{self.where}: {name} was replaced while it was read: it will be read anew")
        return FetchError(f"{self.where}: {name}: the store answers {status}: check bucket, path and endpoint")

    @property
    def _base(self) -> str:
        if self.endpoint:
            return f"{self.endpoint}/{self.bucket}"
        if "." in self.bucket:  # no certificate matches such a host name
            return f"https://s3.{self.region}.amazonaws.com/{self.bucket}"
        return f"https://{self.bucket}.s3.{self.region}.amazonaws.com"

    def _signed(self, method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
        if self.credentials is None:
            return dict(headers)
        return signed_headers(method, url, headers, self.credentials, self.region, self.now())

    def _page(self, client: httpx2.Client, query: Mapping[str, str]) -> ElementTree.Element:
        url = f"{self._base}/?" + "&".join(f"{name}={escaped(value)}" for name, value in sorted(query.items()))
        response = self._ask(client, "GET", url, {})
        if response.status_code != 200:
            raise self._list_refusal(response)
        root = _xml(response)
        if root is None:
            raise FetchError(f"{self._base} does not answer as S3 does: check spec.model.s3.endpoint")
        return root

    def _described(self, client: httpx2.Client, name: str) -> RemoteFile:
        url = f"{self._base}/{escaped(self.prefix + name, safe='/')}"
        response = self._ask(client, "HEAD", url, {"x-amz-checksum-mode": "ENABLED"})
        if response.status_code != 200:
            raise self.refusal(response.status_code, name)
        etag, size = response.headers.get("etag", ""), response.headers.get("content-length", "")
        if not size.isdigit() or not etag:
            raise FetchError(f"{self.where}: the store tells no size or ETag of {name}: it does not speak S3")
        return RemoteFile(name, int(size), url, etag, _digest(response.headers))

    def _ask(self, client: httpx2.Client, method: str, url: str, headers: Mapping[str, str]) -> httpx2.Response:
        try:
            response = client.request(method, url, headers=self._signed(method, url, headers))
        except httpx2.TransportError as error:
            host = urlsplit(url).netloc
            raise RetryableError(f"{host} cannot be reached ({type(error).__name__})") from error
        if response.status_code in {408, 429} or response.status_code >= 500:
            raise RetryableError(f"the store answers {response.status_code}")
        return response

    def _list_refusal(self, response: httpx2.Response) -> FetchError:
        root = _xml(response)
        code = (root.findtext("{*}Code") if root is not None else None) or str(response.status_code)
        if code == "NoSuchBucket" or response.status_code == 404:
            return FetchError(f"there is no bucket {self.bucket}: check model.uri and model.s3.endpoint")
        if code in {"PermanentRedirect", "AuthorizationHeaderMalformed"} or response.status_code == 301:
            right = response.headers.get("x-amz-bucket-region", "another one")
            return FetchError(f"the bucket {self.bucket} is in region {right}, not {self.region}: set model.s3.region")
        if response.status_code in {401, 403}:
            return self._forbidden(code)
        return FetchError(f"{self.where}: the store answers {response.status_code} {code}: check model.s3")

    def _forbidden(self, code: str) -> FetchError:
        if self.credentials is None:
            return FetchError(
                f"{self.where} is not public ({code}): name a Secret in spec.model.s3.credentialsSecretRef"
            )
        return FetchError(
            f"{self.where} is closed to the credentials of {self.credentials_from} ({code}): they need"
            " s3:GetObject and s3:ListBucket on it"
        )


def _xml(response: httpx2.Response) -> ElementTree.Element | None:
    if len(response.content) > _ANSWER_LIMIT_BYTES:
        return None
    try:  # expat refuses entities that grow without bound, and loads none from elsewhere
        return ElementTree.fromstring(response.content)  # noqa: S314
    except ElementTree.ParseError:
        return None


def _digest(headers: Mapping[str, str]) -> Digest | None:
    """The stored SHA-256 where there is one of the whole object; else the ETag where it is the content's MD5."""
    try:
        sha256 = base64.b64decode(headers.get(_SHA256, ""), validate=True).hex()
    except binascii.Error:  # of parts: "…-3"
        sha256 = ""
    if len(sha256) == 64:
        return Digest("sha256", sha256)
    etag = headers.get("etag", "").strip('"')
    keyed = headers.get("x-amz-server-side-encryption", "AES256") != "AES256"
    customer = "x-amz-server-side-encryption-customer-algorithm" in headers
    if _MD5.fullmatch(etag) and not keyed and not customer:
        return Digest("md5", etag)
    return None
