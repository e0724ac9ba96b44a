from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from llmservice_operator.framework.public_keys import public_keys_of
from llmservice_planner.key_file import KeyFileError


def pem(key: Any) -> str:
    encoded: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return encoded.decode()


FIRST, SECOND, THIRD = (pem(Ed25519PrivateKey.generate()) for _ in range(3))


def test_the_keys_follow_their_file_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.pem"
    path.write_text(FIRST)
    keys = public_keys_of(path)
    assert keys() == FIRST
    path.write_text(f"# the present one\n{FIRST}{SECOND}")
    assert keys() == FIRST + SECOND
    path.write_text("nothing")
    assert keys() == FIRST + SECOND
    path.unlink()
    assert keys() == FIRST + SECOND
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert ["the keys stay as they were" in one for one in errors] == [True, True]


@pytest.mark.parametrize(
    "content",
    ["", FIRST + SECOND + THIRD, pem(generate_private_key(SECP256R1())), FIRST.replace("M", "!", 1), "\x00"],
)
def test_what_holds_no_public_keys_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.pem"
    path.write_text(content)
    with pytest.raises(KeyFileError, match="does not hold one or two Ed25519 public keys in PEM"):
        public_keys_of(path)
    with pytest.raises(KeyFileError, match="cannot be read: No such file"):
        public_keys_of(tmp_path / "absent")
