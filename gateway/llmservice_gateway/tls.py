"""A TLS certificate from files, loaded again when they change: a mounted Secret is renewed while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

logger = logging.getLogger(__name__)

PERIOD_S = 10.0


class CertificateError(ValueError):
    """The files hold no certificate with its key: one sentence for the user."""


class Certificate:
    """The context that new connections use; those open keep the certificate that they began with."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises CertificateError."""
        self._files = (certificate, key)
        self._loaded = self._content()
        self.context = self._new_context()

    async def follow(self) -> None:
        """Reload on changes until cancelled; a certificate that cannot be used is logged, and the earlier one stays."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self.reload()

    def reload(self) -> bool:
        """Whether the files have changed and the new certificate is in use."""
        try:
            content = self._content()
            if content == self._loaded:
                return False
            self._loaded = content
            self._new_context()  # tried first on another one: a key that does not fit would leave this one unusable
            self.context.load_cert_chain(*self._files)
        except (CertificateError, ssl.SSLError, OSError) as error:
            logger.error(  # noqa: TRY400  # a file that does not fit needs no traceback
                "the TLS certificate was not replaced, the earlier one stays in use: %s", error
            )
            return False
        logger.info("the TLS certificate was replaced from %s", self._files[0])
        return True

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(*self._files)
        except (ssl.SSLError, OSError) as error:
            why = getattr(error, "strerror", None) or error
            raise CertificateError(
                f"no certificate with its key in {self._files[0]} and {self._files[1]}: {why}: expected PEM files,"
                " as in a Secret of type kubernetes.io/tls"
            ) from error
        return context

    def _content(self) -> tuple[bytes, ...]:
        try:
            return tuple(path.read_bytes() for path in self._files)
        except OSError as error:
            raise CertificateError(f"cannot read {error.filename}: {error.strerror}") from error
