"""Heads beyond the bound, over a real socket, and what the HTTP process imports."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import pytest

from llmservice_httpserver.protocol import MAX_HEAD_BYTES


def _converse(server: Any, *pieces: bytes) -> bytes:
    """All that the server answers before it closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before it was all sent
        try:
            while received := connection.recv(65536):
                answer += received
        except ConnectionResetError:
            pass  # closed with our bytes unread: what came before stays valid
    return answer


GET = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


def test_a_long_head_within_the_bound_is_served(server: Any) -> None:
    answer = _converse(server, GET + b"x-long: " + b"a" * (MAX_HEAD_BYTES - 1000) + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([GET + b"x-long: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n"], id="one header"),
        pytest.param([GET + b"".join(b"x-%d: a\r\n" % n for n in range(20_000)) + b"\r\n"], id="many headers"),
        pytest.param([b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n"], id="request line"),
    ],
)
def test_a_head_beyond_the_bound_is_refused(server: Any, pieces: list[bytes]) -> None:
    answer = _converse(server, *pieces)
    assert answer.startswith(b"HTTP/1.1 431")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


def test_a_head_that_never_ends_is_cut_off(server: Any) -> None:
    answer = _converse(server, GET, *([b"x-more: " + b"a" * 4096 + b"\r\n"] * 200))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431")  # b"": reset before the answer was read
    assert server.get("/version")[0] == 200


def test_a_large_body_does_not_count_as_a_head_nor_does_what_follows_it(server: Any) -> None:
    body = b'{"prompt": "a"' + b" " * 2 * MAX_HEAD_BYTES + b"}"
    post = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    answer = _converse(server, post + GET[:20], GET[20:] + b"\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 2


def test_what_is_no_http_is_still_a_400(server: Any) -> None:
    assert _converse(server, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_the_http_process_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, llmservice_server.http.server, llmservice_server.commands.serve;"
        "print(*{'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "\n"
