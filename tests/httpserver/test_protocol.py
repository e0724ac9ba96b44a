"""What a client may send, and how slowly, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llmservice_httpserver.listening import HttpServer, ListenError, bind
from llmservice_httpserver.protocol import MAX_HEAD_BYTES, BoundedHttpProtocol
from llmservice_planner.addresses import ANY_ADDRESS

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = 2**18


class App:
    """Answers with the body that it received, before it is received (/early), or with more than a socket holds: in one
    piece (/large), or without an end (/endless)."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == "/endless":
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
            await asyncio.sleep(0)
        if scope["path"] == "/large":
            body = bytes(LARGE)
        await send({"type": "http.response.body", "body": b"[" + body + b"]"})


@asynccontextmanager
async def served(client_timeout_s: float = 5.0) -> AsyncIterator[tuple[App, HttpServer, int]]:
    app = App()
    server = HttpServer(app, BoundedHttpProtocol.with_timeout(client_timeout_s))
    listener = bind("127.0.0.1", 0, "--port")
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # what is not read stays in the process
    port = listener.getsockname()[1]
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[listener])
    try:
        yield app, server, port
    finally:
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        for task in list(server.server_state.tasks):
            task.cancel()


async def converse(port: int, *pieces: bytes) -> bytes:
    """All that is answered until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        async with asyncio.timeout(10):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            while received := await reader.read(65536):
                answer += received
    except ConnectionError:
        pass  # closed with our bytes unread
    finally:
        writer.close()
    return answer


def code(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="length and chunks"),
        pytest.param(b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", id="chunks and length"),
        pytest.param(b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", id="two lengths"),
        pytest.param(b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", id="the same length twice"),
        pytest.param(b"Content-Length: +3\r\n\r\nabc", id="a length with a sign"),
        pytest.param(b"Content-Length: 3, 4\r\n\r\nabcd", id="a list of lengths"),
        pytest.param(b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", id="chunked is not last"),
        pytest.param(b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", id="a space before the colon"),
        pytest.param(b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", id="a chunk size that is no number"),
        pytest.param(b"X: a\r\n Content-Length: 3\r\n\r\nabc", id="a folded line"),
        pytest.param(b"X: a\x00b\r\n\r\n", id="NUL"),
    ],
)
async def test_a_request_that_two_servers_could_read_differently_is_refused(head: bytes) -> None:
    async with served() as (app, _, port):
        answer = await converse(port, b"POST / HTTP/1.1\r\nHost: x\r\n" + head, GET)
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1 ") == 1, "what follows is not read as a request"
        assert app.bodies == []


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(GET)


CHUNKED = b"POST / HTTP/1.1\r\n" + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "bodies"),
    [
        pytest.param([POST + GET], [GET], id="at once"),
        pytest.param([POST, GET], [GET], id="head and body"),
        pytest.param([POST[:30], POST[30:] + GET[:5], GET[5:]], [GET], id="pieces"),
        pytest.param([POST + GET + POST + GET + GET], [GET, GET, b""], id="pipelined"),
        pytest.param([GET + POST + GET], [b"", GET], id="behind another"),
        pytest.param([CHUNKED], [b"ab"], id="chunks"),
        pytest.param([CHUNKED * 1500], [b"ab"] * 1500, id="more than a stack has room for"),
    ],
)
async def test_another_protocol_that_is_asked_for_is_ignored(pieces: list[bytes], bodies: list[bytes]) -> None:
    """As Java's client asks for h2c. The body is no request of its own."""
    async with served() as (app, _, port):
        answer = await converse(port, *pieces, LAST)
    assert app.bodies == [*bodies, b""]
    assert answer.count(b"HTTP/1.1 200 OK") == len(app.bodies)
    assert answer.count(b"HTTP/1.1 400") == 0


async def test_a_head_beyond_the_bound_is_refused() -> None:
    async with served() as (_, _, port):
        answer = await converse(port, b"GET / HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431")
    assert code(answer) == "headers_too_large"


@pytest.mark.parametrize("start", [b"", GET], ids=["the first request", "one after another"])
async def test_a_head_that_does_not_arrive_in_time_is_refused(start: bytes) -> None:
    async with served(client_timeout_s=0.1) as (_, _, port):
        answer = await converse(port, start + b"GET / HTTP/1.1\r\nHost: ")
    answer = answer[answer.index(b"HTTP/1.1 408") :]
    assert code(answer) == "request_timeout"


async def test_a_connection_without_a_request_is_closed() -> None:
    async with served(client_timeout_s=0.1) as (_, _, port):
        assert await converse(port) == b""


@pytest.mark.parametrize("rest", [b"ab", b"abc", b"abc\r\n"], ids=["part of the body", "the body", "an empty line"])
async def test_bytes_after_an_early_answer_keep_no_connection(rest: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmservice_httpserver.listening.KEEP_ALIVE_S", 0.3)
    async with served() as (app, _, port), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /early HTTP/1.1\r\nContent-Length: 3\r\n\r\n")
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(rest)
        assert await reader.read() == b""
        writer.close()
    assert app.bodies == [b""]


async def test_nothing_is_written_into_an_answer_in_progress() -> None:
    async with served() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /endless HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"nonsense\r\n\r\n")
        received = b""
        async with asyncio.timeout(10):
            try:
                while piece := await reader.read(2**20):
                    received = received[-20:] + piece
                    assert b"HTTP/1.1" not in received
            except ConnectionError:
                pass
        writer.close()


async def test_a_client_that_does_not_read_is_disconnected_and_costs_a_bounded_buffer() -> None:
    async with served(client_timeout_s=0.2) as (_, server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /endless HTTP/1.1\r\n\r\n")
        connections = server.server_state.connections
        async with asyncio.timeout(10):
            while not connections:
                await asyncio.sleep(0)
            while connections:
                assert all(each.transport.get_write_buffer_size() < 2**18 for each in connections)
                await asyncio.sleep(0.01)
        writer.transport.abort()


@asynccontextmanager
async def slow_reader(port: int, request: bytes) -> AsyncIterator[socket.socket]:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, request)
        async with asyncio.timeout(20):
            yield client


ONLY = b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("request_", [ONLY, ONLY.replace(b"close", b"keep-alive")], ids=["close", "keep-alive"])
async def test_an_answer_that_is_read_slowly_but_steadily_is_sent_whole(
    request_: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than a client may read nothing, and than a connection without a request is kept."""
    monkeypatch.setattr("llmservice_httpserver.listening.KEEP_ALIVE_S", 0.5)
    async with served(client_timeout_s=0.5) as (_, _, port), slow_reader(port, request_) as client:
        num_bytes = 0
        while piece := await asyncio.get_running_loop().sock_recv(client, 16384):
            num_bytes += len(piece)
            await asyncio.sleep(0.02)
    assert num_bytes > LARGE


@pytest.mark.parametrize("unread", [LARGE, LARGE // 2, 12_000], ids=["the start", "the middle", "the end"])
@pytest.mark.parametrize("request_", [ONLY, ONLY.replace(b"close", b"keep-alive")], ids=["close", "keep-alive"])
async def test_a_client_that_stops_reading_an_answer_is_disconnected(
    request_: bytes, unread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmservice_httpserver.listening.KEEP_ALIVE_S", 0.2)
    async with served(client_timeout_s=0.2) as (_, server, port), slow_reader(port, request_) as client:
        connections = server.server_state.connections
        while not any(one.transport.get_write_buffer_size() for one in connections):
            await asyncio.sleep(0)
        while any(one.transport.get_write_buffer_size() > unread for one in connections):
            await asyncio.get_running_loop().sock_recv(client, 512)
        assert all(one.transport.get_write_buffer_size() for one in connections), "something is left to be read"
        while connections:
            await asyncio.sleep(0.01)


async def test_a_client_that_sends_no_http_behind_an_answer_that_it_does_not_read_is_disconnected() -> None:
    keeping = ONLY.replace(b"close", b"keep-alive")
    async with served(client_timeout_s=0.2) as (_, server, port), slow_reader(port, keeping) as client:
        loop, connections = asyncio.get_running_loop(), server.server_state.connections
        while not any(one.transport.get_write_buffer_size() for one in connections):
            await asyncio.sleep(0)
        while any(one.transport.get_write_buffer_size() > 12_000 for one in connections):
            await loop.sock_recv(client, 512)
        await loop.sock_sendall(client, b"no HTTP\r\n\r\n")
        while connections:
            await asyncio.sleep(0.01)


async def test_a_request_that_is_read_slowly_but_steadily_is_answered_whole() -> None:
    async with served() as (app, _, port):
        body = bytes(200_000)
        head = b"POST / HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        answer = await converse(port, head, *(body[at : at + 20_000] for at in range(0, len(body), 20_000)))
        assert answer.startswith(b"HTTP/1.1 200")
        assert app.bodies == [body]


@pytest.mark.parametrize("client", ["127.0.0.1", "::1"])
def test_by_default_pods_of_ipv4_and_of_ipv6_are_reached(client: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with bind(ANY_ADDRESS, 0, "--port") as listener:
        socket.create_connection((client, listener.getsockname()[1]), timeout=5).close()


def test_a_taken_port_names_its_flag() -> None:
    with bind("127.0.0.1", 0, "--port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=rf"port {port} of 127.0.0.1.*choose another --metrics-port"):
            bind("127.0.0.1", port, "--metrics-port")
