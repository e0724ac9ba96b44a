"""An S3 API on the loopback for listing and reading, with path-style addresses."""

from __future__ import annotations

import hashlib
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from harness.stores.file_server import FileServer, Request, Response

_PAGE = 2
"""Keys in a response, so that a few files take several pages."""


class ObjectStore(FileServer):
    """One bucket, `models`, readable with `key_id`; None: public."""

    def __init__(self, objects: dict[str, bytes], key_id: str | None = "AKIDEXAMPLE") -> None:
        super().__init__()
        self.objects = dict(objects)
        self.key_id = key_id
        self.region = "eu-test-1"
        self.in_parts = False
        """Objects were uploaded in parts: their ETags are no MD5."""

    def find(self, request: Request) -> Response:
        if self.key_id is not None and f"Credential={self.key_id}/" not in (request.authorization or ""):
            return _error(403, "InvalidAccessKeyId" if request.authorization else "AccessDenied")
        if self.key_id is not None and f"/{self.region}/s3/aws4_request" not in (request.authorization or ""):
            return _error(400, "AuthorizationHeaderMalformed", f"<Region>{self.region}</Region>")
        if request.path in {"/models", "/models/"}:
            return self._listing({name: values[0] for name, values in parse_qs(request.query).items()})
        if not request.path.startswith("/models/"):
            return _error(404, "NoSuchBucket")
        key = request.path.removeprefix("/models/")
        if key not in self.objects:
            return _error(404, "NoSuchKey")
        content = self.objects[key]
        etag = hashlib.md5(content).hexdigest()  # noqa: S324 - S3's
        return Response(content=content, file=key, headers={"ETag": f'"{etag}{"-3" * self.in_parts}"'})

    def _listing(self, query: dict[str, str]) -> Response:
        prefix = query.get("prefix", "")
        keys = sorted(key for key in self.objects if key.startswith(prefix) and "/" not in key[len(prefix) :])
        begin = int(query.get("continuation-token", "0"))
        page, rest = keys[begin : begin + _PAGE], keys[begin + _PAGE :]
        contents = "".join(f"<Contents><Key>{escape(key)}</Key></Contents>" for key in page)
        more = f"<NextContinuationToken>{begin + _PAGE}</NextContinuationToken>" if rest else ""
        return _xml(
            200,
            f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{contents}'
            f"<IsTruncated>{str(bool(rest)).lower()}</IsTruncated>{more}</ListBucketResult>",
        )


def _error(status: int, code: str, more: str = "") -> Response:
    return _xml(status, f"<Error><Code>{code}</Code><Message>no</Message>{more}</Error>")


def _xml(status: int, text: str) -> Response:
    return Response(status, text.encode(), {"Content-Type": "application/xml"})
