"""Runs a real etcd and kube-apiserver from the folder `KUBEBUILDER_ASSETS`, as envtest does."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from aiohttp import ClientSession

from llmservice_local.client import Endpoint
from llmservice_local.component import Component, ComponentError, ComponentSpec
from llmservice_local.loopback import free_port
from llmservice_local.node.process import base_environment

START_S = 60.0
AUDIT_LOG = "audit.log"
"""In the state folder: a line per request of a service account, with its verb, URI and status code."""

_AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - {level: Metadata, userGroups: ["system:serviceaccounts"]}
  - {level: None}
"""


@asynccontextmanager
async def serve_control_plane(
    assets: Path, state_dir: Path, port: int, session: ClientSession
) -> AsyncIterator[Endpoint]:
    """Start both on loopback ports with an empty data folder; raises `ComponentError` if one is missing or fails."""
    for program in ("etcd", "kube-apiserver"):
        if not (assets / program).is_file():
            raise ComponentError(f"KUBEBUILDER_ASSETS is {assets}, but that folder has no {program}")
    folder = state_dir / "control-plane"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    token = secrets.token_urlsafe(32)
    tokens = folder / "tokens.csv"
    tokens.touch(mode=0o600)
    tokens.write_text(f'{token},admin,admin,"system:masters"\n', encoding="utf-8")
    (folder / "audit-policy.yaml").write_text(_AUDIT_POLICY, encoding="utf-8")
    key = await _signing_key(folder)
    etcd_port, api_port = free_port(), free_port(port)
    async with AsyncExitStack() as stack:
        for spec in (
            _etcd(assets, folder, state_dir, etcd_port),
            _apiserver(assets, folder, state_dir, (etcd_port, api_port), (tokens, key)),
        ):
            component = Component(spec)
            stack.push_async_callback(component.stop)
            await component.start(session, START_S)
        yield Endpoint(f"https://127.0.0.1:{api_port}", token, folder / "certificates" / "apiserver.crt")


def _etcd(assets: Path, folder: Path, state_dir: Path, port: int) -> ComponentSpec:
    url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    return ComponentSpec(
        name="etcd",
        command=[
            str(assets / "etcd"),
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
            "--unsafe-no-fsync",  # the data is deleted with the cluster
        ],
        log=state_dir / "components" / "etcd.log",
        health_url=f"{url}/health",
        env=base_environment(),
    )


def _apiserver(
    assets: Path, folder: Path, state_dir: Path, ports: tuple[int, int], credentials: tuple[Path, Path]
) -> ComponentSpec:
    (etcd_port, api_port), (tokens, key) = ports, credentials
    return ComponentSpec(
        name="kube-apiserver",
        command=[
            str(assets / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={api_port}",
            f"--cert-dir={folder / 'certificates'}",
            f"--token-auth-file={tokens}",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=RBAC",
            f"--audit-policy-file={folder / 'audit-policy.yaml'}",
            f"--audit-log-path={state_dir / AUDIT_LOG}",
            "--disable-admission-plugins=ServiceAccount",  # no controller here creates the default accounts
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
        ],
        log=state_dir / "components" / "kube-apiserver.log",
        health_url=f"https://127.0.0.1:{api_port}/readyz",
        env=base_environment(),
        stop_grace_s=10.0,
    )


async def _signing_key(folder: Path) -> Path:
    """Generate the key for service account tokens, which the API server requires."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ComponentError("KUBEBUILDER_ASSETS needs openssl on the PATH, for a service account key")
    key = folder / "service-account.key"
    process = await asyncio.create_subprocess_exec(
        openssl, "genrsa", "-out", str(key), "2048", stderr=asyncio.subprocess.DEVNULL
    )
    if status := await process.wait():
        raise ComponentError(f"openssl genrsa ended with status {status}")
    return key
