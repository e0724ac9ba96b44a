"""The real command, against an API server and a pod on loopback: from its credentials to its end on SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from llmservice_gateway.access.keys import Policy, key_secret, new_key
from llmservice_gateway.commands.gateway import COMMAND
from llmservice_planner.command import main

pytestmark = pytest.mark.slow

LLMSERVICE = Path(sys.executable).with_name("llmservice")
TOKEN = "loopback-token"


@pytest.fixture
async def served(
    cluster: Any, start_pod: Callable[[str], Awaitable[Any]], tmp_path: Path
) -> AsyncIterator[tuple[Any, Any, Path]]:
    """A pod, the API server that knows it, and a kubeconfig, whose bearer token it wants."""
    pod = await start_pod("a")
    service = {"metadata": {"name": "llama", "namespace": "default"}, "spec": {"model": {"uri": "file:///m"}}}
    cluster.emit("llmservices", "ADDED", service)
    cluster.emit("pods", "ADDED", pod.manifest("llama"))
    cluster.add_kind("secrets")

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"message": "who are you?"}, status=401)
        response: web.StreamResponse = await cluster.handle(request)
        return response

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(_kubeconfig(f"http://127.0.0.1:{runner.addresses[0][1]}")))
    yield pod, cluster, kubeconfig
    await runner.cleanup()


def _kubeconfig(server: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "loopback",
        "contexts": [{"name": "loopback", "context": {"cluster": "loopback", "user": "me"}}],
        "clusters": [{"name": "loopback", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": {"token": TOKEN}}],
    }


async def _gateway(kubeconfig: Path, *flags: str) -> tuple[asyncio.subprocess.Process, str]:
    process, log = await _started(kubeconfig, "--port", "0", *flags)
    return process, _address(log, "listening")


async def _started(kubeconfig: Path, *flags: str) -> tuple[asyncio.subprocess.Process, str]:
    """The process, and what it logged until it listened or ended."""
    process = await asyncio.create_subprocess_exec(
        LLMSERVICE, "gateway", "--host", "127.0.0.1", "--metrics-port", "0", *flags,
        env=os.environ | {"KUBECONFIG": str(kubeconfig)}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    log = b""
    async for line in process.stderr:
        log += line
        if b"listening on" in line:
            break
    return process, log.decode()


def _address(log: str, what: str) -> str:
    found = re.search(rf"{what} on ([\d.:]+)", log)
    assert found, log
    return f"http://{found[1]}"


async def test_metrics_have_a_port_of_their_own_until_the_drain_is_over(served: tuple[Any, Any, Path]) -> None:
    pod, _, kubeconfig = served
    go_on = asyncio.Event()

    async def slow(_request: web.Request) -> web.Response:
        await go_on.wait()
        return web.json_response({})

    pod.answer = slow
    process, log = await _started(kubeconfig, "--port", "0")
    url, metrics = _address(log, "listening"), _address(log, "metrics")
    in_flight = 'llmservice_gateway_in_flight{model="llama"} 1.0'
    async with asyncio.timeout(30), aiohttp.ClientSession() as client:
        while await _status(client, f"{url}/ready") != 200:
            await asyncio.sleep(0.01)
        assert await _status(client, f"{url}/metrics") == 404
        asking = asyncio.create_task(client.post(f"{url}/v1/completions", json={"model": "llama"}))
        while in_flight not in await (await client.get(f"{metrics}/metrics")).text():
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        await _until_closed(url)
        assert in_flight in await (await client.get(f"{metrics}/metrics")).text()
        go_on.set()
        assert (await asking).status == 200
        assert await process.wait() == 0


async def test_equal_ports_serve_everything_on_one(served: tuple[Any, Any, Path]) -> None:
    _, _, kubeconfig = served
    port = str(_free_port())
    process, log = await _started(kubeconfig, "--port", port, "--metrics-port", port)
    async with asyncio.timeout(30), aiohttp.ClientSession(_address(log, "listening")) as client:
        for path in ("/metrics", "/health", "/v1/models"):
            assert await _status(client, path) == 200
        process.terminate()
        assert await process.wait() == 0


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
async def test_a_taken_port_is_one_clear_sentence(served: tuple[Any, Any, Path], flag: str) -> None:
    _, _, kubeconfig = served
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process, log = await _started(kubeconfig, "--port", "0", flag, str(port))
        assert await process.wait() == 2
    sentence = f"cannot listen on port {port} of 127.0.0.1: Address already in use: choose another {flag} or --host"
    assert log.splitlines()[-1] == f"llmservice gateway: {sentence}"


async def _status(client: aiohttp.ClientSession, url: str) -> int:
    async with client.get(url) as response:
        await response.read()
        return response.status


def test_half_a_certificate_is_one_clear_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--tls-cert", "tls.crt"]) == 2
    assert "--tls-cert and --tls-key belong together" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "flag",
    [
        ["--client-timeout", "0"],
        ["--read-timeout", "nan"],
        ["--hold-timeout", "soon"],
        ["--drain-timeout", "nan"],
        ["--drain-timeout", "-1"],
        ["--replicas", "0"],
        ["--max-body-mib", "0"],
        ["--max-held-requests", "-1"],
    ],
)
def test_times_and_numbers_that_are_none_are_refused(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(flag)
    assert flag[0] in capsys.readouterr().err


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


async def test_sigterm_lets_a_stream_finish_and_exits_0(served: tuple[Any, Any, Path]) -> None:
    pod, _, kubeconfig = served
    go_on = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    pod.answer = stream
    process, url = await _gateway(kubeconfig)
    async with asyncio.timeout(30), aiohttp.ClientSession(url) as client:
        while await _status(client, "/ready") != 200:
            await asyncio.sleep(0.01)
        async with client.post("/v1/completions", json={"model": "llama"}) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            process.send_signal(signal.SIGTERM)
            await _until_closed(url)
            go_on.set()
            assert await response.read() == b"data: [DONE]\n\n"
        assert await process.wait() == 0


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event(
    served: tuple[Any, Any, Path], never_ending: Any
) -> None:
    pod, _, kubeconfig = served

    pod.answer = never_ending
    process, url = await _gateway(kubeconfig, "--drain-timeout", "0.1")
    async with asyncio.timeout(30), aiohttp.ClientSession(url) as client:
        while await _status(client, "/ready") != 200:
            await asyncio.sleep(0.01)
        async with client.post("/v1/completions", json={"model": "llama"}) as response:
            assert await response.content.readany() == b"data: 1\n\n"
            process.terminate()
            rest = await response.read()
        assert b"shutting_down" in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await process.wait() == 0


async def _until_closed(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except (ConnectionRefusedError, ConnectionResetError):  # reset: it closed while this one waited to be accepted
            return
        writer.close()
        await asyncio.sleep(0.01)


async def test_namespace_flag_limits_the_watched_namespaces(served: tuple[Any, Any, Path]) -> None:
    _, cluster, kubeconfig = served
    process, url = await _gateway(kubeconfig, "--namespace", "default", "--drain-timeout", "1")
    async with asyncio.timeout(30), aiohttp.ClientSession(url) as client:
        while await _status(client, "/ready") != 200:
            await asyncio.sleep(0.01)
        async with client.get("/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["llama"]
        process.terminate()
        assert await process.wait() == 0
    assert cluster.paths == {
        "/apis/serving.llmservice.io/v1alpha1/namespaces/default/llmservices",
        "/api/v1/namespaces/default/pods",
    }


async def test_missing_kubeconfig_is_one_clear_sentence(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        LLMSERVICE, "gateway",
        env=os.environ | {"KUBECONFIG": str(tmp_path / "absent")}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert stderr.splitlines()[-1].startswith(b"llmservice gateway: no cluster to follow")
    assert b"Traceback" not in stderr


async def test_gateway_that_cannot_follow_the_cluster_any_more_ends_with_an_error(
    served: tuple[Any, Any, Path],
) -> None:
    pod, cluster, kubeconfig = served
    manifest = pod.manifest("llama")
    del manifest["metadata"]["uid"]  # not a Kubernetes API
    cluster.emit("pods", "ADDED", manifest)
    process, _ = await _gateway(kubeconfig, "--drain-timeout", "1")
    async with asyncio.timeout(30):
        assert await process.wait() == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--redis-url", "redis://127.0.0.1:1/0"], "--redis-url and --signing-keys are for API keys: set --keys-names"),
        (["--signing-keys", "keys"], "--redis-url and --signing-keys are for API keys: set --keys-namespace as well"),
        (["--keys-namespace", "llmservice", "--signing-keys", "absent"], "--signing-keys: the signing keys in absent"),
        (["--keys-namespace", "llmservice", "--redis-url", "http://redis"], "--redis-url: expected redis://HOST:PORT"),
    ],
)
def test_flags_of_keys_that_cannot_work_are_refused(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gateway", *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"llmservice gateway: {sentence}")


async def test_an_open_gateway_says_so_and_one_with_keys_wants_one(served: tuple[Any, Any, Path]) -> None:
    _, _, kubeconfig = served
    for flags, status in (([], 200), (["--keys-namespace", "llmservice"], 401)):
        process, log = await _started(kubeconfig, "--port", "0", *flags)
        assert ("no API keys are required" in log) is (status == 200)
        async with asyncio.timeout(30), aiohttp.ClientSession(_address(log, "listening")) as client:
            while await _status(client, "/ready") != 200:
                await asyncio.sleep(0.01)
            assert await _status(client, "/v1/models") == status
            process.terminate()
            assert await process.wait() == 0


async def test_gateways_with_one_redis_count_a_keys_requests_together(
    served: tuple[Any, Any, Path], redis_of: Any, tmp_path: Path
) -> None:
    _, cluster, kubeconfig = served
    key = new_key()
    fields = key_secret("alice", key, Policy(requests_per_minute=5))
    data = {name: base64.b64encode(text.encode()).decode() for name, text in fields["stringData"].items()}
    cluster.emit("secrets", "ADDED", {"metadata": fields["metadata"] | {"namespace": "llmservice"}, "data": data})
    (tmp_path / "redis").mkdir()
    redis = redis_of(tmp_path / "redis")
    redis.start()
    flags = ["--port", "0", "--keys-namespace", "llmservice", "--redis-url", redis.url, "--replicas", "2"]
    started = await asyncio.gather(*(_started(kubeconfig, *flags) for _ in range(2)))
    urls = [_address(log, "listening") for _, log in started]
    statuses = []
    async with asyncio.timeout(60), aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:
        for url in urls:
            while await _status(client, f"{url}/ready") != 200:
                await asyncio.sleep(0.01)
        for number in range(8):
            url = f"{urls[number % 2]}/v1/completions"
            async with client.post(url, json={"model": "llama", "max_tokens": 1}) as response:
                statuses.append(response.status)
        for process, _ in started:
            process.terminate()
            assert await process.wait() == 0
    assert statuses == [200] * 5 + [429] * 3
