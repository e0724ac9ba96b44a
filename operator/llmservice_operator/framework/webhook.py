"""The validating webhook, and its certificate.

The chart owns the webhook's configuration, with `failurePolicy: Ignore`: while no operator answers, an apply works all
the same, and a pass reports what the webhook would have denied.

The certificate is in a Secret, which every replica copies to files for kopf's server. cert-manager fills the Secret, or
the leader does, with a self-signed certificate that it also writes to the webhook's configuration as `caBundle`.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import kopf
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmservice_operator.api.resource import GROUP, MANAGER, PLURAL, VERSION
from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.kube_client import APPLY, JSON, KubeClient, KubeError
from llmservice_operator.review import Review
from llmservice_operator.settings import WebhookSettings

logger = logging.getLogger(__name__)

_LOOK_S, _FIRST_LOOK_S = 60.0, 2.0
_VALID = timedelta(days=365)
_RENEWED = timedelta(days=30)
"""Before its end."""
_CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


@dataclass(slots=True, eq=False)
class Certificate:
    """Keeps the files in sync with the Secret."""

    client: KubeClient
    webhook: WebhookSettings
    address: str
    """That the webhook binds to; a specific one may be called directly, as on a developer's machine."""
    leads: Callable[[], bool]
    folder: Path
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the files exist."""

    @property
    def certificate_file(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key_file(self) -> Path:
        return self.folder / "tls.key"

    async def run(self) -> None:
        """For ever: read the Secret, renew it in time, copy it."""
        while True:
            try:
                await self.keep(datetime.now(UTC))
            except (KubeError, OSError) as error:  # nothing depends on the webhook
                logger.warning("the webhook's certificate can't be kept, will be repeated: %s", error)
            await asyncio.sleep(_LOOK_S if self.ready.is_set() else _FIRST_LOOK_S)

    async def keep(self, now: datetime) -> None:
        """Check the Secret once; raises KubeError."""
        secret = await self.client.find("GET", f"{self._path}/{self.webhook.name}")
        if self.webhook.configuration is not None and self.leads():
            if secret is None or not self._lasts(secret, now):
                secret = await self._write(secret, now)
                logger.info("the webhook has a new certificate")
            await self._publish(self.webhook.configuration, _decoded(secret, "ca.crt"))
        if secret is not None and _loaded(secret) is not None:  # kopf's server ends if one does not load
            self._copy(_decoded(secret, "tls.crt"), _decoded(secret, "tls.key"))
            self.ready.set()

    def _copy(self, certificate: bytes, key: bytes) -> None:
        """Both without yielding to the event loop, so that kopf's server never loads a mismatched pair."""
        for path, content in ((self.key_file, key), (self.certificate_file, certificate)):
            if not path.exists() or path.read_bytes() != content:
                new = path.with_suffix(".new")
                new.touch(mode=0o600)
                new.write_bytes(content)
                new.replace(path)

    def _lasts(self, secret: Manifest, now: datetime) -> bool:
        certificate = _loaded(secret)
        if certificate is None or certificate.not_valid_after_utc - _RENEWED <= now:
            return False
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return False
        trusted = _decoded(secret, "tls.crt") in _decoded(secret, "ca.crt")
        return trusted and names == x509.SubjectAlternativeName(self._names)

    async def _write(self, before: Manifest | None, now: datetime) -> Manifest:
        """The previous certificate stays trusted: replicas serve it for some more seconds."""
        certificate, key = self_signed(self._names, now)
        trusted = certificate + (_decoded(before, "tls.crt") if before else b"")
        data = {"tls.crt": certificate, "tls.key": key, "ca.crt": trusted}
        metadata = {"name": self.webhook.name, "namespace": self.webhook.namespace}
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": metadata,
            "data": {name: base64.b64encode(content).decode() for name, content in data.items()},
        }
        if before is None:
            return await self.client.request("POST", self._path, body=manifest, content_type=JSON)
        manifest["metadata"] = {**metadata, "resourceVersion": before["metadata"]["resourceVersion"]}
        path = f"{self._path}/{self.webhook.name}"
        return await self.client.request("PUT", path, body=manifest, content_type=JSON)

    async def _publish(self, configuration: str, trusted: bytes) -> None:
        """Write the CA to the webhook's configuration, if there is one."""
        path = f"{_CONFIGURATIONS}/{configuration}"
        present = await self.client.find("GET", path)
        if present is None:
            return
        bundle = base64.b64encode(trusted).decode()
        webhooks = present.get("webhooks") or []
        if all(one["clientConfig"].get("caBundle") == bundle for one in webhooks):
            return
        applied = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": configuration},
            "webhooks": [{"name": one["name"], "clientConfig": {"caBundle": bundle}} for one in webhooks],
        }
        query = {"fieldManager": MANAGER, "force": "true"}
        await self.client.request("PATCH", path, body=applied, content_type=APPLY, query=query)

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.webhook.namespace}/secrets"

    @property
    def _names(self) -> list[x509.GeneralName]:
        """The names by which the API server calls the webhook."""
        service = x509.DNSName(f"{self.webhook.name}.{self.webhook.namespace}.svc")
        try:
            address = ipaddress.ip_address(self.address)
        except ValueError:
            return [service, x509.DNSName(self.address)]
        return [service] if address.is_unspecified else [service, x509.IPAddress(address)]


def self_signed(names: list[x509.GeneralName], now: datetime) -> tuple[bytes, bytes]:
    """A certificate for these names, valid from a minute ago, and its key; both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "llmservice webhook")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


def _loaded(secret: Manifest) -> x509.Certificate | None:
    """The Secret's certificate; None where it is invalid, or the key does not match."""
    try:
        certificate = x509.load_pem_x509_certificate(_decoded(secret, "tls.crt"))
        key = serialization.load_pem_private_key(_decoded(secret, "tls.key"), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return certificate if certificate.public_key() == key.public_key() else None


def _decoded(secret: Manifest, name: str) -> bytes:
    try:
        return base64.b64decode((secret.get("data") or {}).get(name) or "", validate=True)
    except ValueError:
        return b""


PATH = PLURAL
"""Of the webhook's URL; kopf takes it as the handler's id."""
_REVIEW_S = 4.0
"""The chart lets the API server wait for 5 s."""
_DENIED = 422
_RELOAD_S = 5.0

Reviewing = Callable[[Manifest, Manifest | None], Awaitable[Review]]


def register_admission(
    registry: kopf.OperatorRegistry,
    settings: kopf.OperatorSettings,
    certificate: Certificate,
    address: tuple[str, int],
    review: Reviewing,
) -> None:
    """Serve at `address` with the certificate, once there is one; a changed one is loaded within seconds."""

    async def serve(answer: Any) -> AsyncIterator[Any]:
        await certificate.ready.wait()
        host, port = address
        server = kopf.WebhookServer(
            addr=host,
            port=port,
            certfile=certificate.certificate_file,
            pkeyfile=certificate.key_file,
            file_check_interval=_RELOAD_S,
        )
        async for client_config in server(answer):
            yield client_config

    settings.admission.server = serve

    @kopf.on.validate(
        group=GROUP, version=VERSION, plural=PLURAL, id=PATH, operations=["CREATE", "UPDATE"], registry=registry
    )
    async def validate(*, body: kopf.Body, warnings: list[str], **more: Any) -> None:
        before = more["old"]
        try:
            async with asyncio.timeout(_REVIEW_S):
                verdict = await review(dict(body), None if before is None else dict(before))
        except TimeoutError:
            warnings.append("the operator did not review this in time: its conditions will report what is wrong")
            return
        except Exception:
            logger.exception("a review failed, the object is admitted")
            return
        warnings.extend(verdict.warnings)
        if verdict.denied is not None:
            raise kopf.AdmissionError(verdict.denied, code=_DENIED)
