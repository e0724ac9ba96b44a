"""The gateway's public keys, from the file that the operator is given; it is read again when it changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from llmservice_planner.key_file import KeyFile, KeyFileError

_PEM_KEY = re.compile(r"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_MAX_KEYS = 2  # a server takes as many


def public_keys_of(path: Path) -> Callable[[], str]:
    """Returns one or two Ed25519 keys in PEM, and nothing else of the file. Raises KeyFileError as `KeyFile`."""
    file = KeyFile(path, "gateway's public keys", _blocks)
    return lambda: "".join(f"{block}\n" for block in file.keys)


def _blocks(text: str) -> tuple[str, ...]:
    blocks = tuple(_PEM_KEY.findall(text))
    if not 1 <= len(blocks) <= _MAX_KEYS or not all(map(_is_ed25519, blocks)):
        raise KeyFileError(
            "it does not hold one or two Ed25519 public keys in PEM: give public-keys.pem of the Secret that"
            " `llmservice signing-key` makes"
        )
    return blocks


def _is_ed25519(block: str) -> bool:
    try:
        return isinstance(load_pem_public_key(block.encode()), Ed25519PublicKey)
    except (ValueError, UnsupportedAlgorithm):
        return False
