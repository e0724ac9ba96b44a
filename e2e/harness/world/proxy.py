"""An API server's front, as one operator sees it: it keeps count of the writes, and can fall silent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import ClientSession, ClientTimeout, web


@dataclass
class Write:
    """A request that changes something; `time_s` is by the monotonic clock."""

    time_s: float
    method: str
    path: str


@dataclass
class ApiProxy:
    """What passes through, and whether anything does."""

    upstream: str
    session: ClientSession
    url: str = ""
    writes: list[Write] = field(default_factory=list)
    watches: int = 0
    last_words: bytes | None = None
    """What every watch brings before it is closed at once; None: watches stay open."""
    bookmark: str | None = None
    """The version in the bookmarks that new watches bring, five a second and nothing else; None: they bring all."""
    bookmarks: int = 0
    fault: int | None = None
    """What the first request of each list, watch and discovery is answered, 0: nothing; None: none fails."""
    failed: int = 0
    hold: asyncio.Event | None = None
    """Lists wait for it, where there is one."""
    begun_at: list[str] = field(default_factory=list)
    """The version from which each watch was begun."""
    _pumps: set[asyncio.Task[None]] = field(default_factory=set)
    _open: int = 0
    _seen: set[tuple[str, bool]] = field(default_factory=set)
    _silenced: set[int] = field(default_factory=set)

    def silence_watches(self) -> None:
        """From now on the watches that are open bring nothing, and their connections stay: what a dead network does."""
        self._silenced |= set(range(self._open))

    def break_watches(self, last_words: bytes = b"") -> None:
        """Close every watch that is open, and every new one, until `last_words` is None again."""
        self.last_words = last_words
        for pump in self._pumps:
            pump.cancel()

    def writes_since(self, time_s: float, *, but: str = "leases") -> list[Write]:
        return [write for write in self.writes if write.time_s >= time_s and f"/{but}" not in write.path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method not in {"GET", "HEAD"}:
            self.writes.append(Write(time.monotonic(), request.method, request.path))
        elif self.fault is not None and (found := self._fail_once(request)) is not None:
            return found
        if self.hold is not None and "limit" in request.query:
            await self.hold.wait()
        headers = {key: value for key, value in request.headers.items() if key.lower() not in {"host", "connection"}}
        body = await request.read()
        async with self.session.request(
            request.method, self.upstream + request.path_qs, headers=headers, data=body or None
        ) as upstream:
            kept = {"Content-Type": upstream.headers.get("Content-Type", "application/json")}
            if upstream.status == 200 and request.query.get("watch") in {"true", "1"}:
                self.begun_at.append(request.query.get("resourceVersion", ""))
                chunks = upstream.content.iter_any() if self.bookmark is None else self._bookmarks(self.bookmark)
                return await self._stream(request, chunks, kept)
            return web.Response(status=upstream.status, body=await upstream.read(), headers=kept)

    def _fail_once(self, request: web.Request) -> web.Response | None:
        """By path, and for each of list and watch, of what kopf asks: the resynchronisation has a test of its own."""
        call = (request.path, "watch" in request.query)
        if call in self._seen or "kopf" not in request.headers.get("User-Agent", ""):
            return None
        self._seen.add(call)
        self.failed += 1
        if not self.fault and request.transport is not None:
            request.transport.abort()
        return web.json_response({"kind": "Status", "message": "not now"}, status=self.fault or 500)

    async def _stream(
        self, request: web.Request, chunks: AsyncIterator[bytes], headers: dict[str, str]
    ) -> web.StreamResponse:
        number = self._open
        self._open += 1
        self.watches += 1
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        pump = asyncio.create_task(self._pump(number, chunks, response))
        self._pumps.add(pump)
        try:
            if self.last_words is None:
                await asyncio.wait({pump})
            if self.last_words is not None:
                await response.write(self.last_words)
        finally:
            self._pumps.discard(pump)
            pump.cancel()
        return response

    async def _bookmarks(self, version: str) -> AsyncIterator[bytes]:
        event = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}}
        while True:
            yield json.dumps(event).encode() + b"\n"
            self.bookmarks += 1
            await asyncio.sleep(0.2)

    async def _pump(self, number: int, chunks: AsyncIterator[bytes], response: web.StreamResponse) -> None:
        async for chunk in chunks:
            if number in self._silenced:
                await asyncio.Event().wait()
            await response.write(chunk)


@asynccontextmanager
async def serve_proxy(upstream: str) -> AsyncIterator[ApiProxy]:
    """A proxy of its own for one operator, on a free loopback port."""
    async with ClientSession(timeout=ClientTimeout(total=None, connect=5)) as session:
        proxy = ApiProxy(upstream, session)
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield proxy
        finally:
            await runner.cleanup()
