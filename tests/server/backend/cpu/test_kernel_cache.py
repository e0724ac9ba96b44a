"""Compiled kernels are kept in a folder, and no state of that folder stops a process."""

from __future__ import annotations

import fcntl
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.errors import TypingError

from llmservice_server.backend import compile_cache
from llmservice_server.backend.compile_cache import COMPILATIONS, Compilations
from llmservice_server.backend.cpu import kernel_cache
from llmservice_server.backend.cpu.compiled import compiled, compiled_inner
from llmservice_server.backend.cpu.kernel_cache import KernelCache, Locks, forget_unused

DAY_S = 86400.0


def _twice(number: Any) -> Any:
    return 2 * number


_twice_within = compiled_inner()(_twice)


def _four_times(number: Any) -> Any:
    return _twice_within(_twice_within(number))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compile_cache.warn_once, "warned", False)
    yield tmp_path / "kernels"
    kernel_cache._in_use.cache_clear()


def _counts(run: Callable[[], object]) -> tuple[int, int]:
    """What `run` compiles and loads."""
    before = Compilations(COMPILATIONS.compiled, COMPILATIONS.loaded)
    run()
    return COMPILATIONS.compiled - before.compiled, COMPILATIONS.loaded - before.loaded


def _use() -> None:
    """As a new process: compile, or load, for two signatures."""
    twice = compiled()(_twice)
    assert twice(3) == 6
    assert twice(np.float32(1.5)) == 3.0


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kernel"))


def test_what_one_process_compiled_the_next_one_loads(folder: Path) -> None:
    began_s = COMPILATIONS.seconds
    assert _counts(_use) == (2, 0)
    compiled_s = COMPILATIONS.seconds
    assert compiled_s > began_s
    assert _counts(_use) == (0, 2)
    assert COMPILATIONS.seconds == compiled_s
    assert len(_entries(folder)) == 2


def test_what_a_kernel_calls_is_kept_as_a_part_of_it(folder: Path) -> None:
    def use() -> None:
        assert compiled()(_four_times)(3) == 12

    assert _counts(use) == (1, 0)
    assert _counts(use) == (0, 1)
    assert len(_entries(folder)) == 1


@pytest.mark.parametrize("damage", [lambda content: content[:40], lambda content: content[:-1] + b"?", lambda _: b""])
def test_a_damaged_entry_is_compiled_again_and_replaced(
    folder: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    _use()
    for entry in _entries(folder):
        entry.write_bytes(damage(entry.read_bytes()))
    assert _counts(_use) == (2, 0)
    assert [record.message.count("is damaged") for record in caplog.records] == [1]  # not one for each kernel
    assert _counts(_use) == (0, 2)


def test_without_a_folder_that_can_be_written_each_process_compiles_and_warns_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")
    assert _counts(_use) == (2, 0)
    assert len(caplog.records) == 1
    assert "Not a directory" in caplog.text


def test_on_a_full_volume_kernels_are_compiled_and_no_part_of_an_entry_is_left(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # no file grows beyond
        assert _counts(_use) == (2, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(caplog.records) == 1
    assert not [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "cpu_folder", lambda: None)
    assert _counts(_use) == (2, 0)
    assert _counts(_use) == (2, 0)


def test_an_entry_that_another_process_compiles_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use()
    compiled_elsewhere = {entry: entry.read_bytes() for entry in _entries(folder)}
    others = []
    for entry in compiled_elsewhere:
        entry.unlink()
        others.append(entry.with_suffix(".lock").open("w"))
        fcntl.flock(others[-1], fcntl.LOCK_EX)

    def other_process_ends(_: float) -> None:
        for entry, content in compiled_elsewhere.items():
            entry.write_bytes(content)
        for lock in others:
            lock.close()

    monkeypatch.setattr(kernel_cache.time, "sleep", other_process_ends)
    assert _counts(_use) == (0, 2)


def test_an_entry_is_waited_for_only_so_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use()
    monkeypatch.setattr(kernel_cache, "_LOCKS", Locks(patience_s=1.0))
    slept_s: list[float] = []
    monkeypatch.setattr(kernel_cache.time, "sleep", slept_s.append)
    entries = _entries(folder)
    with ExitStack() as held:
        for entry in entries:
            entry.unlink()
            fcntl.flock(held.enter_context(entry.with_suffix(".lock").open("w")), fcntl.LOCK_EX)
        assert _counts(_use) == (2, 0)
    assert sum(slept_s) == pytest.approx(1.0, abs=0.1)
    assert _entries(folder) == entries


def test_a_function_that_cannot_be_compiled_leaves_no_lock(folder: Path) -> None:
    def fails(number: Any) -> Any:
        return number.no_such_attribute

    for _ in range(2):  # the second would wait for the first one's lock
        with pytest.raises(TypingError, match="no_such_attribute"):
            compiled()(fails)(3)
    (lock,) = folder.rglob("*.lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_no_lock_is_kept_after_compiling(folder: Path) -> None:
    _use()
    locks = list(folder.rglob("*.lock"))
    assert len(locks) == 2
    for lock in locks:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_writers_of_different_keys_at_once_never_give_each_other_their_code(folder: Path) -> None:
    """numba's own cache numbers its files, so that two of them can take the same one."""
    caches = [KernelCache(_twice)._cache_file for _ in range(4)]
    folders = {path.parent for path in (cache.path("key") for cache in caches)}
    for each in folders:
        each.mkdir(parents=True)
    wrong = []

    def write_and_read(number: int) -> None:
        for turn in range(50):
            key = f"key {(number + turn) % 3}"
            caches[number].save(key, key * 1000)
            if caches[number].load(key) != key * 1000:
                wrong.append(key)

    threads = [threading.Thread(target=write_and_read, args=(number,)) for number in range(len(caches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(_entries(folder)) == 3


def test_another_function_or_type_has_another_entry(folder: Path) -> None:
    _use()

    def thrice(number: Any) -> Any:
        return 3 * number

    assert compiled()(thrice)(3) == 9
    assert len(_entries(folder)) == 3


def test_folders_of_other_versions_are_removed_after_a_month_without_use(tmp_path: Path) -> None:
    now = 1e9
    for name, age_s in (("used", DAY_S), ("forgotten", 31 * DAY_S)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "entry").touch()
        os.utime(tmp_path / name, (now - age_s, now - age_s))
    forget_unused(tmp_path, now)
    assert [folder.name for folder in tmp_path.iterdir()] == ["used"]


def test_the_folder_is_one_of_these_versions_and_sources(tmp_path: Path) -> None:
    source = tmp_path / "kernels.py"
    names = set()
    for text in ("a = 1", "a = 2"):
        source.write_text(text)
        kernel_cache.versions.cache_clear()
        names.add(kernel_cache.versions(source))
    assert len(names) == 2
    assert all(name.startswith("llmservice-") and "-numba-" in name for name in names)


def test_a_process_that_may_not_use_tiles_runs_no_code_of_one_that_may(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for is_permitted in (False, True):
        monkeypatch.setattr(kernel_cache, "may_use_tiles", lambda permitted=is_permitted: permitted)
        kernel_cache.versions.cache_clear()
        names.add(kernel_cache.versions(Path(__file__)))
    kernel_cache.versions.cache_clear()
    assert len(names) == 2
