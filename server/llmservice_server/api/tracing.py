"""A span for every request to the model, as a part of the caller's trace. Needs the extra `otel`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmservice_server.api.trace_attributes import OPERATIONS, of_answer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_ENVIRONMENT = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

_SEND_S = 2.0  # a collector that is gone may delay the end of the process by no more


class TracingError(Exception):
    """Traces are asked for and cannot be sent: one sentence for the user."""


def tracer_provider(endpoint: str | None) -> TracerProvider | None:
    """What sends spans to an OTLP collector over HTTP; None where neither `endpoint` nor the environment names one.

    The environment's other OTEL_* variables (headers, sampler, resource attributes) count as everywhere. Raises
    TracingError where the extra is not installed.
    """
    if endpoint is None and not any(os.environ.get(name) for name in _ENVIRONMENT):
        return None
    if find_spec("opentelemetry") is None or any(
        find_spec(f"opentelemetry.{module}") is None for module in ("sdk", "exporter")
    ):
        raise TracingError("traces need the extra otel: pip install 'llmservice[otel]', or name no collector")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "llmservice"}
    provider = TracerProvider(resource=Resource.create({**resource, "service.version": version("llmservice")}))
    timeout_s = None if os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") else _SEND_S
    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=timeout_s)))
    return provider


class Tracing:
    """ASGI middleware. Takes a W3C `traceparent` over; endpoints describe the request on `scope["span"]`.

    The trace's id goes into the access log, and the span's context into the answer's `traceparent`, so that a caller
    without a trace of its own can find this one.
    """

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = provider.get_tracer("llmservice", version("llmservice"))
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(scope["path"]) if scope["type"] == "http" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "llmservice"}
        parent = self._propagator.extract(dict(Headers(scope=scope)))
        with self._tracer.start_as_current_span(
            operation, parent, SpanKind.SERVER, attributes, record_exception=False
        ) as span:
            scope["span"] = span
            figures: dict[str, Any] = scope["access_log"]
            figures["trace_id"] = f"{span.get_span_context().trace_id:032x}"
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier, set_span_in_context(span))

            async def send_with_context(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], *_encoded(carrier)]
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                        span.set_attribute("error.type", str(message["status"]))
                await send(message)

            try:
                await self._app(scope, receive, send_with_context)
            finally:
                span.set_attributes(of_answer(figures))


def _encoded(headers: dict[str, str]) -> Iterator[tuple[bytes, bytes]]:
    for name, value in headers.items():
        yield name.encode("latin-1"), value.encode("latin-1")
