"""List and watch, through everything that an API server does to its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException

from llmservice_gateway.reflector import KubernetesAPI, Reflector


def item(name: str, **fields: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "default"}, **fields}


@pytest.fixture
def naps() -> list[float]:
    return []


@pytest.fixture
async def reflector(api: Any, cluster: Any, naps: list[float]) -> AsyncIterator[Reflector]:
    """Follows a cluster with the pod `a`; its first watch is open."""

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    cluster.emit("pods", "ADDED", item("a"))
    reflector = Reflector(api, "/api/v1/pods", dict, lambda: None, "app=x", sleep=nap)
    task = asyncio.create_task(reflector.run())
    await eventually(lambda: calls(cluster) == ["list", "2"])
    yield reflector
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


def calls(cluster: Any) -> list[str]:
    """`list` for each list, the resource version for each watch."""
    return [query["resourceVersion"] if call == "watch" else "list" for call, query in cluster.calls]


def names(reflector: Reflector) -> set[str]:
    return {found["metadata"]["name"] for found in reflector.objects()}


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_cache_follows_additions_changes_and_deletions(reflector: Reflector, cluster: Any) -> None:
    assert names(reflector) == {"a"}
    cluster.emit("pods", "ADDED", item("b"))
    await eventually(lambda: names(reflector) == {"a", "b"})
    cluster.emit("pods", "MODIFIED", item("b", field_of_a_later_release="x"))
    await eventually(lambda: any("field_of_a_later_release" in found for found in reflector.objects()))
    cluster.emit("pods", "DELETED", item("a"))
    await eventually(lambda: names(reflector) == {"b"})


async def test_watches_that_the_server_ends_continue_from_the_last_version(
    reflector: Reflector, cluster: Any, naps: list[float]
) -> None:
    for number in range(10):
        cluster.end_watches()
        cluster.emit("pods", "ADDED", item(f"new-{number}"))  # while no watch is open
        await eventually(lambda number=number: f"new-{number}" in names(reflector))
    assert names(reflector) == {"a"} | {f"new-{number}" for number in range(10)}
    assert calls(cluster) == ["list", "2", *(str(2 + number) for number in range(10))]
    assert naps == []
    queries = [query for call, query in cluster.calls if call == "watch"]
    assert all(query["labelSelector"] == "app=x" and query["allowWatchBookmarks"] == "true" for query in queries)


async def test_watch_continues_from_the_version_of_a_bookmark(reflector: Reflector, cluster: Any) -> None:
    bookmark = {"kind": "Pod", "metadata": {"resourceVersion": "42", "creationTimestamp": None}}
    cluster.answers["watch"] = [web.Response(body=cluster.line("BOOKMARK", bookmark))]
    cluster.end_watches()
    await eventually(lambda: calls(cluster) == ["list", "2", "2", "42"])
    assert names(reflector) == {"a"}


async def test_silent_watch_is_given_up_and_continues_from_the_last_version(
    reflector: Reflector, cluster: Any, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server whose node is lost closes no connection."""
    monkeypatch.setattr("llmservice_gateway.reflector.SILENCE_S", 0.05)
    cluster.end_watches()
    await eventually(lambda: calls(cluster)[:4] == ["list", "2", "2", "2"])
    cluster.emit("pods", "ADDED", item("b"))
    await eventually(lambda: names(reflector) == {"a", "b"})
    assert "list" not in calls(cluster)[1:]
    assert not naps, "an event would wait for the end of the pause"


@pytest.mark.parametrize("sent_as", ["status", "event"])
async def test_expired_version_is_answered_with_a_new_list_at_once(
    reflector: Reflector, cluster: Any, naps: list[float], sent_as: str
) -> None:
    expired = cluster.status(410, "Expired")
    cluster.answers["watch"] = [
        web.json_response(expired, status=410)
        if sent_as == "status"
        else web.Response(body=cluster.line("ERROR", expired))
    ]
    cluster.end_watches()
    await eventually(lambda: calls(cluster) == ["list", "2", "2", "list", "2"])
    assert naps == []


async def test_deletions_before_and_during_the_list_after_an_expired_version_are_found(
    reflector: Reflector, cluster: Any
) -> None:
    cluster.emit("pods", "ADDED", item("b"))
    cluster.emit("pods", "ADDED", item("c"))
    await eventually(lambda: names(reflector) == {"a", "b", "c"})
    cluster.lists_released.clear()
    cluster.end_watches()
    cluster.emit("pods", "DELETED", item("b"))  # no watch delivers this
    cluster.compacted = cluster.version
    await eventually(lambda: calls(cluster)[2:] == ["4", "list"])
    cluster.emit("pods", "DELETED", item("c"))  # the list has been read with it, and is not sent yet
    cluster.lists_released.set()
    await eventually(lambda: names(reflector) == {"a"})


@pytest.mark.parametrize("framing", ["chunked", "until closed"])
@pytest.mark.parametrize("cut_at", ["Pod", "\u00fc"])
async def test_nothing_is_lost_when_the_connection_breaks_in_the_middle_of_a_line(
    reflector: Reflector, cluster: Any, naps: list[float], framing: str, cut_at: str
) -> None:
    cluster.end_watches()
    cluster.emit("pods", "ADDED", item("b"))
    cluster.emit("pods", "DELETED", item("a", kind="Pod", note="\u00fc"))
    lines = b"".join(line for version, line in cluster.history["pods"] if version > 2)
    sent = lines[: lines.index(cut_at.encode()) + 1]
    head = b"Transfer-Encoding: chunked\r\n\r\n%x" % len(lines) if framing == "chunked" else b"Connection: close\r\n"
    cluster.answers["watch"] = [b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + sent]
    await eventually(lambda: names(reflector) == {"b"})
    assert len(naps) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        {"status": 403, "text": '{"kind": "Status", "code": 403, "message": "pods is forbidden"}'},
        {"status": 500, "text": "<html>Internal Server Error</html>"},
        {"status": 429, "text": "Too many requests, please try again later.\n"},
        {"status": 503},
    ],
    ids=lambda refusal: str(refusal["status"]),
)
async def test_refused_watch_is_waited_out_and_begun_anew_with_a_list(
    reflector: Reflector, cluster: Any, naps: list[float], caplog: pytest.LogCaptureFixture, refusal: dict[str, Any]
) -> None:
    cluster.answers["watch"] = [web.Response(**refusal), web.Response(**refusal)]
    cluster.end_watches()
    cluster.emit("pods", "DELETED", item("a"))
    cluster.emit("pods", "ADDED", item("b"))
    await eventually(lambda: calls(cluster) == ["list", "2", "2", "list", "4", "list", "4"])
    assert names(reflector) == {"b"}
    assert len(naps) == 2
    assert f"cannot read /api/v1/pods: the API server answered {refusal['status']}: " in caplog.text
    assert refusal.get("text", "").strip() in caplog.text


@pytest.mark.parametrize("left_out", ["", "reason", "message", "code"])
async def test_error_event_is_waited_out_and_followed_by_a_list(
    reflector: Reflector, cluster: Any, naps: list[float], left_out: str
) -> None:
    error = cluster.status(500, "InternalError")
    error.pop(left_out, None)
    cluster.answers["watch"] = [web.Response(body=cluster.line("ERROR", error))]
    cluster.end_watches()
    cluster.emit("pods", "DELETED", item("a"))
    await eventually(lambda: calls(cluster) == ["list", "2", "2", "list", "3"])
    assert names(reflector) == set()
    assert len(naps) == 1


async def test_object_of_3_mib_is_followed(reflector: Reflector, cluster: Any, naps: list[float]) -> None:
    cluster.emit("pods", "ADDED", item("large", note="x" * 3 * 1024**2))
    cluster.emit("pods", "ADDED", item("b"))
    await eventually(lambda: names(reflector) == {"a", "large", "b"})
    assert calls(cluster) == ["list", "2"]
    assert naps == []


async def test_objects_are_kept_and_retries_slow_down_while_the_api_is_away(
    reflector: Reflector, cluster: Any, naps: list[float]
) -> None:
    cluster.answers["watch"] = [web.Response(status=500)]
    cluster.answers["list"] = [b""] * 20
    cluster.end_watches()
    await eventually(lambda: len(naps) == 4)
    assert names(reflector) == {"a"}
    assert naps[3] > naps[0]
    assert all(0 < seconds <= 30 for seconds in naps)
    cluster.answers["list"].clear()
    cluster.emit("pods", "ADDED", item("b"))
    await eventually(lambda: names(reflector) == {"a", "b"})


async def test_change_is_announced_after_the_cache_holds_it(api: Any, cluster: Any) -> None:
    seen: list[set[str]] = []
    reflector = Reflector(api, "/api/v1/pods", dict, lambda: seen.append(names(reflector)))
    task = asyncio.create_task(reflector.run())
    await reflector.synced.wait()
    cluster.emit("pods", "ADDED", item("a"))
    await eventually(lambda: seen == [set(), {"a"}])
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"\xff\xfe", b"a", None], ids=["YAML", "list", "UTF-8", "text", "folder"]
)
async def test_unusable_kubeconfig_is_named(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.mkdir() if content is None else kubeconfig.write_bytes(content)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    with pytest.raises(ConfigException, match=f"the kubeconfig {kubeconfig} cannot be used"):
        await KubernetesAPI.connect()


@pytest.fixture
def in_pod(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server is that of the pod's service account."""

    def load(client_configuration: Configuration) -> None:
        client_configuration.host = cluster.url

    monkeypatch.setattr("kubernetes.aio.config.load_incluster_config", load)
    monkeypatch.setattr(Configuration, "set_default", lambda _: None)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")


@pytest.mark.usefixtures("in_pod")
async def test_a_pod_reaches_the_api_server_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenShift excepts the cluster by networks in NO_PROXY, as Go reads them."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")

    async with await KubernetesAPI.connect() as api:
        answer = await api.get("/api/v1/pods", {}, timeout_s=5)

    assert answer.status == 200


@pytest.mark.usefixtures("in_pod")
async def test_the_watches_of_a_hundred_namespaces_are_open_at_once(cluster: Any) -> None:
    cluster.lists_released.clear()
    async with await KubernetesAPI.connect() as api, asyncio.TaskGroup() as group:
        for _ in range(200):
            group.create_task(api.get("/api/v1/pods", {}, timeout_s=30))
        await eventually(lambda: len(cluster.calls) == 200)
        cluster.lists_released.set()
