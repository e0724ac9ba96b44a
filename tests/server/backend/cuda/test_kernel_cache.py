"""Triton's entries are checked when they are read, and no state of the shared folder stops a process."""

from __future__ import annotations

from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.runtime.cache import get_cache_manager  # noqa: E402

from llmservice_server.backend import compile_cache  # noqa: E402
from llmservice_server.backend.cuda import kernel_cache  # noqa: E402

KEY = "ab" * 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(compile_cache.warn_once, "warned", False)
    kernel_cache.install()
    return tmp_path / "kernels"


def _store() -> None:
    manager = get_cache_manager(KEY)
    paths = {name: manager.put(content, name) for name, content in (("k.cubin", b"\x7fELF"), ("k.json", '{"a": 1}'))}
    manager.put_group("k.json", paths)


def test_a_stored_kernel_is_found_by_the_next_process(folder: Path) -> None:
    assert get_cache_manager(KEY).get_group("k.json") is None
    _store()
    group = get_cache_manager(KEY).get_group("k.json") or {}
    assert Path(group["k.cubin"]).read_bytes() == b"\x7fELF"
    assert Path(group["k.cubin"]).is_relative_to(folder)


@pytest.mark.parametrize("name", ["k.cubin", "k.json", "__grp__k.json"])
def test_a_damaged_kernel_is_compiled_again_and_replaced(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _store()
    (damaged,) = folder.rglob(name)
    damaged.write_bytes(b"")
    assert get_cache_manager(KEY).get_group("k.json") is None
    assert "is damaged" in caplog.text
    _store()
    assert get_cache_manager(KEY).get_group("k.json") is not None


def test_where_the_shared_folder_cannot_be_written_the_users_own_is_used(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")
    _store()
    assert list((tmp_path / "home").rglob("k.cubin"))
    assert (get_cache_manager(KEY).get_group("k.json") or {}).keys() == {"k.cubin", "k.json"}
    assert len(caplog.records) == 1
