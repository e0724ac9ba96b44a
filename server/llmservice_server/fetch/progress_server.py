"""`GET /progress` of a fetching pod: the operator reads it, for an init container may not write to the API."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from llmservice_server.fetch.progress import Progress

_TIMEOUT_S = 5.0


@contextmanager
def serve_progress(progress: Progress, host: str, port: int) -> Iterator[int]:
    """Answer on `host:port` (0: a free one) while the block runs; gives the port. Raises OSError."""

    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S

        def do_GET(self) -> None:
            if self.path != "/progress":
                self.send_error(404)
                return
            seen = progress.snapshot()
            body = json.dumps(
                {
                    "phase": seen.phase,
                    "total_bytes": seen.total_bytes,
                    "done_bytes": seen.done_bytes,
                    "bytes_per_s": round(seen.bytes_per_s),
                    "eta_s": None if seen.eta_s is None else round(seen.eta_s),
                }
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Whoever looks every few seconds leaves no line."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

    server = Server((host, port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="progress server", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
