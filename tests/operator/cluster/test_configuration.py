from __future__ import annotations

from pathlib import Path

import pytest

from llmservice_local.endpoint import Endpoint
from llmservice_operator.cluster.configuration import load_configuration


@pytest.mark.parametrize(
    ("server", "environment", "proxy"),
    [
        ("https://cluster.example:6443", {"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ("https://cluster.example:6443", {"HTTP_PROXY": "http://proxy:3128"}, None),
        ("https://cluster.example:6443", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "cluster.example"}, None),
        ("https://cluster.example:6443", {}, None),
    ],
)
async def test_the_environment_names_the_proxy_once(
    server: str, environment: dict[str, str], proxy: str | None, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Endpoint(server).write_kubeconfig(kubeconfig)

    assert (await load_configuration()).proxy == proxy


async def test_watches_do_not_use_up_the_connections(kubeconfig: Path) -> None:
    """Nine kinds in twelve namespaces are more watches than the client would open by itself."""
    Endpoint("http://127.0.0.1:9").write_kubeconfig(kubeconfig)

    assert (await load_configuration()).connection_pool_maxsize == 0
