"""The command of a pod's init container."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmservice_planner.command import main


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def test_the_folder_of_compiled_kernels_is_made_beside_the_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    kernels = tmp_path / "cache" / ".compiled-kernels"
    fetch = [
        "fetch",
        f"file://{tiny_model}",
        str(tmp_path / "cache" / "tiny"),
        "--shared",
        "--compile-cache",
        str(kernels),
    ]
    for _ in range(2):
        assert main(fetch) == 0
        assert kernels.is_dir()
    assert (tmp_path / "cache" / "tiny" / "config.json").exists()


def test_a_checkpoint_is_fetched_where_that_folder_cannot_be_made(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    fetch = [
        "fetch",
        f"file://{tiny_model}",
        str(tmp_path / "tiny"),
        "--compile-cache",
        str(tmp_path / "file" / "kernels"),
    ]
    assert main(fetch) == 0
    assert "kernels cannot be made: Not a directory" in capsys.readouterr().out
