"""A certificate for the node's own server: a real API server asks its nodes over TLS, and takes any certificate."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path


async def self_signed(folder: Path, name: str) -> ssl.SSLContext:
    """A TLS context with a fresh self-signed certificate; raises `OSError` where it can't be made."""
    openssl = shutil.which("openssl")
    if openssl is None:
        raise FileNotFoundError("openssl is not on the PATH: it makes the node's certificate")
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    process = await asyncio.create_subprocess_exec(
        openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", f"/CN=system:node:{name}",
        "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate),
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    if status := await process.wait():
        raise OSError(f"openssl req ended with status {status}")
    key.chmod(0o600)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
