"""The services that give AWS credentials to a pod, on the loopback: STS, instance metadata and a container's agent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

TOKEN = "web-identity-token"
ROLE = "arn:aws:iam::123456789012:role/reader"
KEY_ID = "ASIAEXAMPLE"
_EXPIRES = "2999-01-01T00:00:00Z"
_ROLES = "/latest/meta-data/iam/security-credentials/"


@contextmanager
def credential_server() -> Iterator[str]:
    """Serve credentials with the key `KEY_ID` and a session token; yields the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """STS: a role for a web identity, or for the holder of another key."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        form = {name: values[0] for name, values in parse_qs(body).items()}
        action, proof = form["Action"], form.get("WebIdentityToken")
        allowed = proof == TOKEN if action == "AssumeRoleWithWebIdentity" else "Authorization" in self.headers
        if form["RoleArn"] != ROLE or not allowed:
            error = "<Error><Type>Sender</Type><Code>AccessDenied</Code><Message>no</Message></Error>"
            self._respond(403, f"<ErrorResponse>{error}</ErrorResponse>")
            return
        credentials = (
            f"<AccessKeyId>{KEY_ID}</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>"
            f"<SessionToken>session</SessionToken><Expiration>{_EXPIRES}</Expiration>"
        )
        result = f"<{action}Result><Credentials>{credentials}</Credentials></{action}Result>"
        self._respond(
            200,
            f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/">{result}</{action}Response>',
        )

    def do_PUT(self) -> None:
        """Instance metadata, version 2: a session."""
        self._respond(200 if self.path == "/latest/api/token" else 404, "metadata-session")

    def do_GET(self) -> None:
        """Instance metadata, and the agent of ECS and of EKS Pod Identity."""
        session = self.headers.get("x-aws-ec2-metadata-token") == "metadata-session"
        if self.path == "/container" and self.headers.get("Authorization") == TOKEN:
            self._respond(200, self._credentials())
        elif self.path == _ROLES and session:
            self._respond(200, "node-role")
        elif self.path == f"{_ROLES}node-role" and session:
            self._respond(200, self._credentials())
        else:
            self._respond(404, "")

    def _credentials(self) -> str:
        keys = {"AccessKeyId": KEY_ID, "SecretAccessKey": "secret", "Token": "session"}
        return json.dumps({"Code": "Success", "Type": "AWS-HMAC", "Expiration": _EXPIRES, **keys})

    def _respond(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass
