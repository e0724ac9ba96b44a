"""The pods of a service, as far as the operator hears them: what they answer at /metrics, /sizing and /progress.

And a gateway's /internal/held.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class TalkingPods:
    """What the service's pods say of themselves on a loopback port: in flight by IP; an IP that is absent is silent."""

    port: int
    in_flight: dict[str, tuple[int, int]] = field(default_factory=dict)
    finished: int = 0
    answered_s: float | None = None
    """Time to the first token of every finished request; None leaves the histogram out."""
    sizing: dict[str, Any] | None = None
    """What a server that sized itself tells."""
    progress: dict[str, Any] | None = None
    held_requests: dict[str, int] | None = None
    """What a gateway holds, by service; None: it does not answer. One gateway listens on the pods' port."""

    async def report(self, request: web.Request) -> web.Response:
        answer = self.sizing if request.path == "/sizing" else self.progress
        return web.Response(status=503) if answer is None else web.json_response(answer)

    async def gateways(self) -> list[str]:
        return [f"http://127.0.0.1:{self.port}"]

    async def held(self, request: web.Request) -> web.Response:
        if self.held_requests is None:
            return web.Response(status=503)
        held = {
            name: {"requests": number, "tokens": 100 * number, "oldest_s": 2.0}
            for name, number in self.held_requests.items()
        }
        return web.json_response({"held": held})

    async def metrics(self, request: web.Request) -> web.Response:
        if request.url.host not in self.in_flight:
            return web.Response(status=500)
        running, waiting = self.in_flight[request.url.host]
        lines = [f"llmservice_num_requests_running {running}", f"llmservice_num_requests_waiting {waiting}"]
        lines += [f'llmservice_request_success_total{{finished_reason="stop"}} {self.finished}']
        if self.answered_s is not None:
            bounds = (0.1, 1.0, 10.0)
            counts = [(bound, self.finished if self.answered_s <= bound else 0) for bound in bounds]
            lines += [f'llmservice_time_to_first_token_seconds_bucket{{le="{le}"}} {count}' for le, count in counts]
        lines += ['llmservice_kv_cache_blocks{state="free"} 1000', 'llmservice_memory_bytes{kind="weights"} 1e6', ""]
        return web.Response(text="\n".join(lines))
