"""The gateway's public keys, from the file that the operator is given; it is read again when it changes."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

logger = logging.getLogger(__name__)

_PEM_KEY = re.compile(r"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_MAX_KEYS = 2  # a server takes as many


class PublicKeyError(Exception):
    """The file cannot be used: one sentence for the user."""


class PublicKeyFile:
    """Raises PublicKeyError where it cannot be used at start; later that is logged, and the keys stay as they were."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._fingerprint()
        self._keys = self._read()

    def keys(self) -> str:
        """One or two Ed25519 keys in PEM, and nothing else of the file."""
        fingerprint = self._fingerprint()
        if fingerprint != self._seen:
            self._seen = fingerprint
            try:
                self._keys = self._read()
            except PublicKeyError as error:
                logger.error("%s; the pods keep the keys that they have", error)  # noqa: TRY400
            else:
                logger.info("the gateway's public keys have changed")
        return self._keys

    def _read(self) -> str:
        try:
            blocks = _PEM_KEY.findall(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", "not UTF-8")
            raise PublicKeyError(f"--gateway-public-keys {self._path} cannot be read: {why}") from None
        if not 1 <= len(blocks) <= _MAX_KEYS or not all(map(_is_ed25519, blocks)):
            raise PublicKeyError(
                f"--gateway-public-keys {self._path} does not hold one or two Ed25519 public keys in PEM: give it"
                " public-keys.pem of the Secret that `llmservice signing-key` makes"
            )
        return "".join(f"{block}\n" for block in blocks)

    def _fingerprint(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)  # noqa: PTH116 - at each pass, and Path.stat costs three times as much
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _is_ed25519(block: str) -> bool:
    try:
        return isinstance(load_pem_public_key(block.encode()), Ed25519PublicKey)
    except (ValueError, UnsupportedAlgorithm):
        return False
