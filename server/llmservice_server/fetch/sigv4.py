"""AWS Signature Version 4 for requests without a body, as every S3-like server understands it.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, urlsplit

_ALGORITHM = "AWS4-HMAC-SHA256"
_NO_BODY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of an account that may read the bucket. `repr` keeps the secrets to itself."""

    access_key_id: str
    secret_access_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        return f"Credentials({self.access_key_id[:4]}…)"


def signed_headers(
    method: str, url: str, headers: Mapping[str, str], credentials: Credentials, region: str, now: datetime
) -> dict[str, str]:
    """`headers` and those that sign them together with method and URL at `now`."""
    moment = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    token = {"x-amz-security-token": credentials.session_token} if credentials.session_token else {}
    sent = {**headers, "x-amz-content-sha256": _NO_BODY, "x-amz-date": moment, **token}
    parts = urlsplit(url)
    covered = {name.lower(): " ".join(value.split()) for name, value in {**sent, "host": parts.netloc}.items()}
    names = ";".join(sorted(covered))
    canonical = "\n".join(
        [
            method,
            parts.path or "/",
            _canonical_query(parts.query),
            *(f"{name}:{covered[name]}" for name in sorted(covered)),
            "",
            names,
            _NO_BODY,
        ]
    )
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    to_sign = "\n".join([_ALGORITHM, moment, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    signature = hmac.new(_signing_key(credentials, moment[:8], region), to_sign.encode(), hashlib.sha256).hexdigest()
    proof = f"{_ALGORITHM} Credential={credentials.access_key_id}/{scope},SignedHeaders={names},Signature={signature}"
    return {**sent, "Authorization": proof}


def escaped(text: str, safe: str = "") -> str:
    """Percent-encoded as the signature wants it, beyond which only letters, digits and `-._~` stay."""
    return quote(text, safe=f"-._~{safe}")


def _canonical_query(query: str) -> str:
    pairs = sorted((escaped(name), escaped(value)) for name, value in parse_qsl(query, keep_blank_values=True))
    return "&".join(f"{name}={value}" for name, value in pairs)


def _signing_key(credentials: Credentials, date: str, region: str) -> bytes:
    key = f"AWS4{credentials.secret_access_key}".encode()
    for part in (date, region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
