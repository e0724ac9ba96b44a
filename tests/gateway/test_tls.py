"""The certificate: used, replaced while connections are open, and kept where the new one is bad."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from llmservice_gateway.tls import Certificate, CertificateError
from llmservice_planner.command import main


def write_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject).issuer_name(subject).public_key(key.public_key()).serial_number(1)
        .not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    )  # fmt: skip
    files = folder / "tls.crt", folder / "tls.key"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    return files


def name_of(certificate: Certificate) -> str:
    """The subject that a new connection is shown."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    sent, received = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(received, sent)
    other = certificate.context.wrap_bio(sent, received, server_side=True)
    for _ in range(3):
        for side in (one, other):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    found: Any = one.getpeercert(binary_form=True)
    return x509.load_der_x509_certificate(found).subject.rfc4514_string()


def test_new_connections_get_the_new_certificate_once_it_is_whole(tmp_path: Path) -> None:
    files = write_certificate(tmp_path, "first")
    certificate = Certificate(*files)
    assert name_of(certificate) == "CN=first"
    assert not certificate.reload(), "nothing has changed"
    key = files[1].read_bytes()
    write_certificate(tmp_path, "second")
    renewed = files[1].read_bytes()
    files[1].write_bytes(key)
    assert not certificate.reload(), "the key is still that of the first"
    assert name_of(certificate) == "CN=first"
    files[1].write_bytes(renewed)
    assert certificate.reload()
    assert name_of(certificate) == "CN=second"


def test_a_file_that_vanishes_changes_nothing(tmp_path: Path) -> None:
    files = write_certificate(tmp_path, "first")
    certificate = Certificate(*files)
    files[0].unlink()
    assert not certificate.reload()
    assert name_of(certificate) == "CN=first"


def test_files_that_hold_no_certificate_are_one_clear_sentence(tmp_path: Path) -> None:
    files = write_certificate(tmp_path, "first")
    files[1].write_text("no key")
    with pytest.raises(CertificateError, match=r"tls\.key: .*expected PEM files"):
        Certificate(*files)
    with pytest.raises(CertificateError, match=r"cannot read .*absent: No such file"):
        Certificate(tmp_path / "absent", files[1])


async def test_https_is_served_with_the_certificate(serving: Any, tmp_path: Path) -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    files = write_certificate(tmp_path, "gateway")
    certificate = Certificate(*files)
    trusted = ssl.create_default_context(cafile=str(files[0]))
    trusted.check_hostname = False
    async with (
        serving(app, ssl_context_factory=lambda *_: certificate.context) as url,
        aiohttp.ClientSession() as client,
        client.get(url.replace("http:", "https:"), ssl=trusted) as response,
    ):
        assert response.status == 204


async def test_helm_test_takes_a_certificate_for_another_name(
    serving: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def models(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"data": [{"id": "chat"}]}'})

    certificate = Certificate(*write_certificate(tmp_path, "llm.example.com"))
    async with serving(models, ssl_context_factory=lambda *_: certificate.context) as url:
        check = ["check", url.replace("http:", "https:"), "--timeout", "0"]
        assert await asyncio.to_thread(main, check) == 1
        assert "certificate" in capsys.readouterr().err
        assert await asyncio.to_thread(main, [*check, "--insecure"]) == 0
