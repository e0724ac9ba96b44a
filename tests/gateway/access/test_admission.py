"""Keys, limits and signatures together: requests to a gateway with Secrets, and what its pods get to see."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from starlette.datastructures import Headers

from llmservice_gateway.access.admission import Access
from llmservice_gateway.access.keys import Keyring, Policy, key_secret, new_key
from llmservice_gateway.access.limits import Limiter
from llmservice_gateway.access.signing import PUBLIC_FIELD, SIGNING_FIELD, Signer, SigningKey, signing_secret
from llmservice_gateway.metrics import GatewayMetrics
from llmservice_gateway.reflector import KubernetesAPI
from llmservice_gateway.requests import holding
from llmservice_gateway.requests.inference import GatewayConfig
from llmservice_server.http.authentication import TOKEN_HEADER, GatewayKeys
from llmservice_server.http.error import ApiError

COMPLETIONS = "/v1/completions"


def service(name: str, namespace: str = "team-a") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"model": {"uri": "file:///x"}}}


@dataclass
class Keyed:
    """A running gateway that requires keys, and the API server with its Secrets."""

    front: Any
    cluster: Any
    keyring: Keyring
    start_pod: Callable[[str], Awaitable[Any]]
    public_keys: Path
    usage: str | None = "7 3 2"
    """What pods report."""

    def secret(self, event: str, name: str, key: str, **policy: Any) -> None:
        manifest = key_secret(name, key, Policy(**policy))
        data = {field: base64.b64encode(text.encode()).decode() for field, text in manifest["stringData"].items()}
        metadata = {**manifest["metadata"], "namespace": "llmservice"}
        self.cluster.emit("secrets", event, {**manifest, "metadata": metadata, "data": data})

    async def key(self, name: str, **policy: Any) -> str:
        """A new one, once the gateway knows it."""
        key = new_key()
        self.secret("ADDED", name, key, **policy)
        await self.until(lambda: self.keyring.find(key) is not None)
        return key

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not is_so():
                await asyncio.sleep(0)

    async def serve(self, name: str, namespace: str = "team-a") -> Any:
        """A service with a pod that takes only what the gateway has signed for it."""
        self.cluster.emit("llmservices", "ADDED", service(name, namespace))
        pod = await self.start_pod(f"{name}-{namespace}")
        keys = GatewayKeys(self.public_keys, f"{namespace}/{name}")

        async def answer(request: web.Request) -> web.Response:
            try:
                client = keys.identify(Headers(dict(request.headers)))
            except ApiError as error:
                return web.json_response(error.body, status=error.status, headers={"WWW-Authenticate": keys.challenge})
            headers = {} if self.usage is None else {"x-llmservice-usage": self.usage}
            return web.json_response({"client": client.name, "lane": client.lane}, headers=headers)

        pod.answer = answer
        self.cluster.emit("pods", "ADDED", pod.manifest(name, namespace))
        await self.front.until(name, 1)
        return pod

    async def post(self, key: str | None, model: str = "llama", **body: Any) -> tuple[int, Any, Any]:
        """Status, headers and body."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        sent = {"model": model, "prompt": "x" * 40, "max_tokens": 5} | body
        async with self.front.client.post(COMPLETIONS, json=sent, headers=headers) as response:
            return response.status, response.headers, await response.json()

    def metric(self, name: str, **labels: str) -> float | None:
        value: float | None = self.front.gateway.metrics.registry.get_sample_value(f"llmservice_gateway_{name}", labels)
        return value


@pytest.fixture
async def keyed(
    cluster: Any, api: KubernetesAPI, gateway_front: Any, start_pod: Any, tmp_path: Path
) -> AsyncIterator[Keyed]:
    async with _keyed(cluster, api, gateway_front, start_pod, tmp_path) as keyed:
        yield keyed


@asynccontextmanager
async def _keyed(
    cluster: Any, api: KubernetesAPI, gateway_front: Any, start_pod: Any, folder: Path
) -> AsyncIterator[Keyed]:
    cluster.add_kind("secrets")
    fields = signing_secret("s", [SigningKey.new(datetime.now(UTC))])["stringData"]
    for field in (SIGNING_FIELD, PUBLIC_FIELD):
        (folder / field).write_text(fields[field])
    metrics, limiter = GatewayMetrics(), Limiter()
    keyring = Keyring(api, "llmservice", limiter.why_unusable)
    access = Access(keyring, limiter, metrics, Signer(folder / SIGNING_FIELD))
    following = asyncio.create_task(access.run())
    try:
        async with gateway_front(GatewayConfig(), access=access, metrics=metrics) as front:
            yield Keyed(front, cluster, keyring, start_pod, folder / PUBLIC_FIELD)
    finally:
        following.cancel()
        await asyncio.wait([following])


async def test_a_request_with_a_key_reaches_the_pod_signed_and_without_the_key(keyed: Keyed) -> None:
    pod = await keyed.serve("llama")
    key = await keyed.key("alice", lane="batch")
    status, headers, body = await keyed.post(key)
    assert (status, body) == (200, {"client": "alice", "lane": "batch"})
    assert not [name for name in headers if name.lower().startswith("x-ratelimit")]  # there are no limits
    request, _ = pod.requests[0]
    assert key not in str(request.headers)
    assert keyed.metric("key_requests_total", key="alice", model="llama", code="200") == 1
    tokens = [
        keyed.metric("key_tokens_total", key="alice", model="llama", kind=kind)
        for kind in ("prompt", "cached", "completion")
    ]
    assert tokens == [7, 3, 2]


async def test_without_a_key_or_with_a_wrong_foreign_or_revoked_one_nothing_is_served(keyed: Keyed) -> None:
    pod = await keyed.serve("llama")
    revoked = await keyed.key("mallory")
    keyed.secret("DELETED", "mallory", revoked)
    await keyed.until(lambda: keyed.keyring.find(revoked) is None)
    for presented in (None, "", "sk-wrong", revoked, new_key(), "schlüssel"):
        status, headers, body = await keyed.post(presented)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert body["error"]["type"] == "authentication_error"
        assert body["error"]["code"] == "invalid_api_key"
    for scheme in ("Basic", "bearer-", "Bearer"):
        async with keyed.front.client.post(COMPLETIONS, json={}, headers={"Authorization": f"{scheme} "}) as response:
            assert response.status == 401
    async with keyed.front.client.get("/v1/models") as response:
        assert response.status == 401
    assert not pod.requests


async def test_a_key_reaches_only_its_models_and_namespaces(keyed: Keyed) -> None:
    for name, namespace in (("llama", "team-a"), ("qwen", "team-a"), ("mistral", "team-b")):
        await keyed.serve(name, namespace)
    key = await keyed.key("alice", models=("llama", "mistral"), namespaces=("team-a",))
    assert (await keyed.post(key))[0] == 200
    assert (await keyed.post(key, "team-a/llama"))[0] == 200
    for model in ("qwen", "mistral", "team-b/mistral"):
        status, _, body = await keyed.post(key, model)
        assert (status, body["error"]["type"], body["error"]["code"]) == (403, "permission_error", "model_not_allowed")
    async with keyed.front.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["llama"]


async def test_a_limit_is_told_with_headers_that_openais_clients_read(keyed: Keyed) -> None:
    await keyed.serve("llama")
    key = await keyed.key("alice", requests_per_minute=2, tokens_per_minute=1000)
    status, headers, _ = await keyed.post(key)
    assert status == 200
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - 10 - 5)  # 40 characters, max_tokens 5
    await keyed.post(key)
    async with openai.AsyncOpenAI(base_url=f"{keyed.front.url}/v1", api_key=key, max_retries=0) as client:
        with pytest.raises(openai.RateLimitError, match="may use 2 requests in a minute") as refused:
            await client.completions.create(model="llama", prompt="x")
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert refused.value.code == "rate_limit_exceeded"
    assert keyed.metric("key_refusals_total", key="alice", limit="requests") == 1
    assert keyed.metric("key_requests_total", key="alice", model="llama", code="429") == 1


async def test_a_request_that_can_never_be_allowed_is_not_repeated(keyed: Keyed) -> None:
    await keyed.serve("llama")
    key = await keyed.key("alice", tokens_per_minute=50)
    status, headers, body = await keyed.post(key, max_tokens=60)
    assert (status, headers["x-should-retry"]) == (429, "false")
    assert "Retry-After" not in headers
    assert "lower max_tokens" in body["error"]["message"]


@pytest.mark.parametrize(("usage", "second"), [("10 0 2", 200), (None, 429)])
async def test_unused_tokens_are_given_back_and_unknown_ones_are_not(
    usage: str | None, second: int, keyed: Keyed
) -> None:
    await keyed.serve("llama")
    keyed.usage = usage
    key = await keyed.key("alice", tokens_per_minute=100)
    assert (await keyed.post(key, max_tokens=80))[0] == 200
    assert (await keyed.post(key, max_tokens=70))[0] == second


async def test_a_request_that_no_pod_has_computed_costs_no_tokens(keyed: Keyed) -> None:
    pod = await keyed.serve("llama")

    async def invalid(_: web.Request) -> web.Response:
        return web.json_response({"error": {}}, status=400)

    pod.answer = invalid
    key = await keyed.key("alice", tokens_per_minute=100)
    assert [(await keyed.post(key, max_tokens=80))[0] for _ in range(3)] == [400] * 3


async def test_a_monthly_budget_without_redis_is_refused_with_the_reason(
    keyed: Keyed, caplog: pytest.LogCaptureFixture
) -> None:
    await keyed.serve("llama")
    key = await keyed.key("alice", monthly_tokens=10**6)
    status, _, body = await keyed.post(key)
    assert (status, body["error"]["code"]) == (403, "key_not_usable")
    assert "a monthly budget needs Redis: start the gateway with --redis-url" in body["error"]["message"]
    assert "the API key of the Secret alice is refused: a monthly budget needs Redis" in caplog.text


async def test_the_gateway_is_not_ready_before_its_keys_are_read(
    cluster: Any, api: KubernetesAPI, gateway_front: Any, start_pod: Any, tmp_path: Path
) -> None:
    cluster.lists_released.clear()
    async with _keyed(cluster, api, gateway_front, start_pod, tmp_path) as keyed:
        status, headers, body = await keyed.post("sk-x")
        assert (status, body["error"]["code"]) == (503, "not_ready")
        assert "Retry-After" in headers
        async with keyed.front.client.get("/ready") as response:
            assert response.status == 503
        cluster.lists_released.set()
        await keyed.until(lambda: keyed.keyring.synced)


async def test_a_pod_refuses_a_token_for_another_service_an_old_one_and_none(keyed: Keyed) -> None:
    llama, qwen = await keyed.serve("llama"), await keyed.serve("qwen")
    key = await keyed.key("alice")
    assert (await keyed.post(key))[0] == 200
    request, _ = llama.requests[0]
    for headers, words in (
        ({}, "it has no x-llmservice-token"),
        ({TOKEN_HEADER: request.headers[TOKEN_HEADER]}, "its token is for another service, expected team-a/qwen"),
        ({"Authorization": f"Bearer {key}"}, "it has no x-llmservice-token"),
    ):
        url = f"http://127.0.0.1:{qwen.port}{COMPLETIONS}"
        async with keyed.front.client.post(url, json={}, headers=headers) as response:
            assert response.status == 401
            assert words in (await response.json())["error"]["message"]


async def test_a_pod_that_does_not_trust_the_gateway_is_an_error_of_the_platform_not_of_the_client(
    keyed: Keyed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "FAILED_FOR_S", 0.05)  # else each of the two requests waits twice for 5 s
    await keyed.serve("llama")
    key = await keyed.key("alice", tokens_per_minute=100)
    other = signing_secret("s", [SigningKey.new(datetime.now(UTC))])["stringData"]
    keyed.public_keys.write_text(other[PUBLIC_FIELD])
    for _ in range(2):  # it costs no tokens
        status, headers, body = await keyed.post(key, max_tokens=80)
        assert (status, body["error"]["code"]) == (503, "replicas_unavailable")
    assert "Retry-After" in headers
    assert "pod llama-team-a takes only signed requests, and not this gateway's" in caplog.text
    assert (keyed.metric("retries_total", model="llama", reason="untrusted") or 0) >= 2
