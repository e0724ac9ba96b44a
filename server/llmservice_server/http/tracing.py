"""A span for every request to the model, as a part of the caller's trace. Needs the extra `otel`."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Mapping, MutableMapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmservice_server.http.protocol.embeddings import EmbeddingRequest
from llmservice_server.http.protocol.generation import GenerationRequest
from llmservice_server.http.protocol.rerank import RerankRequest, ScoreRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/score": "score",
}
_OF_FIGURES = {  # the access log's names
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "ttft_s": "gen_ai.response.time_to_first_chunk",
}


Described = GenerationRequest | EmbeddingRequest | RerankRequest | ScoreRequest


def describe(scope: MutableMapping[str, Any], request: Described) -> None:
    """Add what was asked for to the request's span, where it has one."""
    if (span := scope.get("span")) is not None:
        span.update_name(f"{OPERATIONS[scope['path']]} {request.model or ''}".rstrip())
        span.set_attributes(of_request(request))


def of_request(request: Described) -> dict[str, Any]:
    """Known once the body has been read."""
    attributes: dict[str, Any] = {"gen_ai.request.model": request.model}
    if isinstance(request, EmbeddingRequest):
        attributes["gen_ai.request.encoding_formats"] = [request.encoding_format]
        attributes["gen_ai.embeddings.dimension.count"] = request.dimensions
    elif isinstance(request, GenerationRequest):
        attributes |= {
            "gen_ai.request.max_tokens": request.token_limit,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.request.choice.count": request.n,
            "gen_ai.request.seed": request.seed,
            "gen_ai.request.stream": request.stream,
        }
    return _given(attributes)


def of_answer(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Known at the end; `figures` are the access log's."""
    return _given({name: figures.get(figure) for figure, name in _OF_FIGURES.items()})


def _given(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


_ENVIRONMENT = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_SEND_S = 2.0  # a collector that is gone may delay the end of the process by no more


class TracingError(Exception):
    """Traces are asked for and cannot be sent: one sentence for the user."""


def tracer_provider(endpoint: str | None) -> TracerProvider | None:
    """What sends spans to an OTLP collector over HTTP; None where neither `endpoint` nor the environment names one.

    The environment's other OTEL_* variables (headers, sampler, resource attributes) count as everywhere. Raises
    TracingError where the extra is not installed, or the collector is no URL: the exporter would only log it, whole,
    with each batch.
    """
    if endpoint is None and not any(os.environ.get(name) for name in _ENVIRONMENT):
        return None
    for url in (endpoint, *map(os.environ.get, _ENVIRONMENT)):
        if url and not url.startswith(("http://", "https://")):
            raise TracingError("the collector of traces is no URL, expected one such as http://otel:4318")
    if find_spec("opentelemetry") is None or any(
        find_spec(f"opentelemetry.{module}") is None for module in ("sdk", "exporter", "instrumentation")
    ):
        raise TracingError("traces need the extra otel: pip install 'llmservice[otel]', or name no collector")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")  # the stable names of HTTP's attributes
    resource = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "llmservice"}
    provider = TracerProvider(resource=Resource.create({**resource, "service.version": version("llmservice")}))
    timeout_s = None if os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") else _SEND_S
    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=timeout_s)))
    return provider


class Tracing:
    """ASGI middleware: OpenTelemetry's, for the requests to the model, with what GenAI's conventions add to its spans.

    Continues the trace of a W3C `traceparent`; endpoints describe the request on `scope["span"]`. The access log has
    the trace's id and the answer's `traceparent` the span's context, so that a caller without a trace can find it.
    """

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
        from opentelemetry.metrics import NoOpMeterProvider

        self._app = app
        self._traced = OpenTelemetryMiddleware(
            self._describe,
            default_span_details=_span_details,
            tracer_provider=provider,
            meter_provider=NoOpMeterProvider(),
            exclude_spans=["receive", "send"],  # otherwise every event of a stream is a span
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in OPERATIONS:
            await self._app(scope, receive, send)
            return
        # No endpoint has a query; a client's may hold a key, or bytes that the library cannot decode.
        await self._traced({**scope, "query_string": b""}, receive, send)

    async def _describe(self, scope: Scope, receive: Receive, send: Send) -> None:
        from opentelemetry.trace import get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = scope["span"] = get_current_span()
        figures: dict[str, Any] = scope["access_log"]
        figures["trace_id"] = f"{span.get_span_context().trace_id:032x}"
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        context = [(name.encode(), value.encode()) for name, value in carrier.items()]

        def send_with_context(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *context]
            elif not message.get("more_body"):
                span.set_attributes(of_answer(figures))  # the library ends the span with this message
            return send(message)

        try:
            await self._app(scope, receive, send_with_context)
        finally:
            if span.is_recording():  # the client disconnected
                span.set_attributes(of_answer(figures))


def _span_details(scope: Scope) -> tuple[str, dict[str, Any]]:
    operation = OPERATIONS[scope["path"]]
    return operation, {"gen_ai.operation.name": operation, "gen_ai.provider.name": "llmservice"}
