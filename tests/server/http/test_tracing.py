"""Traces, as a collector on loopback receives them."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from llmservice_server.http.tracing import TracingError, tracer_provider

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector:
    """Receives OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    spans.extend(span for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing on the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def _attributes(span: Any) -> dict[str, Any]:
    values = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        values[attribute.key] = [part.string_value for part in value.values] if kind == "array_value" else value
    return values


def test_a_request_is_a_span_of_the_callers_trace(start_server: Any, collector: Collector) -> None:
    server = start_server("--otlp-endpoint", collector.url).wait_until_ready()
    body = {"model": "tiny", "prompt": "a secret", "max_tokens": 3, "temperature": 0.5, "ignore_eos": True, "n": 2}
    answer = server.send("POST", "/v1/completions?key=a+secret", body, {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    usage = json.loads(answer.body)["usage"]
    assert answer.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert server.send("POST", "/v1/embeddings", {"model": "tiny", "input": "a secret"}).headers["traceparent"]
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "a", "n": 0})[0] == 400
    assert any(line.get("trace_id") == TRACE for line in server.log)
    server.process.terminate()  # what is left is sent before the end
    assert server.wait_for_exit() == 0
    completion, embedding, refused = collector.spans
    assert (completion.name, completion.trace_id.hex(), completion.parent_span_id.hex()) == (
        "text_completion tiny",
        TRACE,
        PARENT,
    )
    attributes = _attributes(completion)
    assert attributes.pop("gen_ai.response.time_to_first_chunk") > 0
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "llmservice",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ["length"],
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
    }
    assert {name: attributes[name] for name in expected} == expected
    assert _attributes(embedding)["gen_ai.operation.name"] == "embeddings"
    assert _attributes(embedding)["gen_ai.usage.input_tokens"] > 0
    assert _attributes(refused)["http.response.status_code"] == 400
    assert not any(b"secret" in span.SerializeToString() for span in collector.spans)


def test_the_environment_names_the_collector_whose_end_harms_no_request_and_no_shutdown(
    start_server: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
    server = start_server().wait_until_ready()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
    server.send("POST", "/v1/chat/completions", body)
    server.wait_for(lambda: collector.spans or None)
    collector.close()
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "a"})[0] == 200
    server.process.terminate()
    assert server.wait_for_exit() == 0
    (span,) = collector.spans
    assert span.name == "chat tiny"
    assert span.parent_span_id == b""
    assert _attributes(span)["gen_ai.request.stream"] is True
    assert _attributes(span)["gen_ai.usage.output_tokens"] == 2


def test_without_a_collector_nothing_is_traced_and_nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert tracer_provider(None) is None


@pytest.mark.parametrize("endpoint", ["otel:4318", "user:secret@otel", "grpc://otel:4317"])
def test_a_collector_that_is_no_url_is_refused_and_not_repeated(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = r"^the collector of traces is no URL, expected one such as http://otel:4318$"
    with pytest.raises(TracingError, match=expected):
        tracer_provider(endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    with pytest.raises(TracingError, match=expected):
        tracer_provider(None)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(TracingError, match=r"llmservice\[otel\]"):
        tracer_provider("http://127.0.0.1:4318")
