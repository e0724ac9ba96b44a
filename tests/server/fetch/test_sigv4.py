from __future__ import annotations

from datetime import UTC, datetime

import pytest

from llmservice_server.fetch.sigv4 import Credentials, signed_headers

# The examples of AWS's own documentation, "Authenticating Requests: Using the Authorization Header".
ACCOUNT = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
NOW = datetime(2013, 5, 24, tzinfo=UTC)
HOST = "https://examplebucket.s3.amazonaws.com"


@pytest.mark.parametrize(
    ("url", "headers", "signature"),
    [
        (
            f"{HOST}/test.txt",
            {"Range": "bytes=0-9"},
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (f"{HOST}/?lifecycle", {}, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        (f"{HOST}/?max-keys=2&prefix=J", {}, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)
def test_requests_are_signed_as_aws_documents_it(url: str, headers: dict[str, str], signature: str) -> None:
    signed = signed_headers("GET", url, headers, ACCOUNT, "us-east-1", NOW)
    assert signed["Authorization"].endswith(f"Signature={signature}")


def test_credentials_do_not_show_themselves() -> None:
    assert "wJalr" not in repr(ACCOUNT)
