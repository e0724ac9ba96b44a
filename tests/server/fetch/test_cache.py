"""A cache that several processes fetch into, and its lock with a clock that the test sets."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.stores.model_hub import ModelHub
from llmservice_server.fetch.cache import Contents, FolderLock, LockLostError, completed, only_fetch
from llmservice_server.fetch.checkpoint import fetch
from llmservice_server.fetch.source import FetchError

LLMSERVICE = Path(sys.executable).with_name("llmservice")
WEIGHTS = "model.safetensors"
DEADLINE_S = 60.0
LEASE_S = 30.0


def _start(cache: Path) -> subprocess.Popen[bytes]:
    command = [LLMSERVICE, "fetch", "hf://org/open", cache, "--shared", "--lease", "2"]
    return subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL)


def _wait_for_part(cache: Path, at_least: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while sum(part.stat().st_size for part in cache.glob(f".{WEIGHTS}.*.part")) < at_least:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_ten_processes_download_once_although_the_first_is_killed(hub: ModelHub, tmp_path: Path) -> None:
    hub.bytes_per_s = 100_000
    cache = tmp_path / "cache"
    first = _start(cache)
    others: list[subprocess.Popen[bytes]] = []
    try:
        _wait_for_part(cache, 50_000)
        others = [_start(cache) for _ in range(9)]
        first.kill()
        first.wait()
        hub.bytes_per_s = None
        assert [other.wait(DEADLINE_S) for other in others] == [0] * 9
    finally:
        for process in (first, *others):
            process.kill()
            process.wait()
    assert (cache / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert hub.sent[WEIGHTS] < 1.5 * len(hub.files[WEIGHTS])
    assert sum(request.path.endswith(f"/{WEIGHTS}") for request in hub.seen) == 2
    assert completed(cache, "hf://org/open") is not None


@pytest.mark.slow
def test_a_terminated_process_releases_the_lock(hub: ModelHub, tmp_path: Path) -> None:
    hub.bytes_per_s = 100_000
    cache = tmp_path / "cache"
    first = subprocess.Popen(
        [LLMSERVICE, "fetch", "hf://org/open", cache, "--shared", "--lease", "3000"],
        env=os.environ,
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_for_part(cache, 50_000)
        first.terminate()
        assert first.wait(10) == 143
    finally:
        first.kill()
        first.wait()
    hub.bytes_per_s = None
    second = _start(cache)
    assert second.wait(DEADLINE_S) == 0


def test_a_folder_is_complete_for_its_uri_and_while_its_files_have_their_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    assert completed(tmp_path, "hf://a/b") is None
    Contents(tmp_path).complete("hf://a/b", ["config.json"])
    assert completed(tmp_path, "hf://a/b") == ["config.json"]
    assert completed(tmp_path, "hf://a/c") is None
    (tmp_path / "config.json").write_bytes(b"")
    assert completed(tmp_path, "hf://a/b") is None


def test_a_fetch_of_other_files_forgets_no_version(tmp_path: Path) -> None:
    """As of an adapter into the folder of its model."""
    (tmp_path / "config.json").write_bytes(b"{}")
    contents = Contents(tmp_path)
    contents.begin({"config.json": 2}, {})
    contents.add("config.json", "v1")
    contents.complete("hf://a/b", ["config.json"])
    Contents(tmp_path).begin({"adapter_config.json": 2}, {})
    assert Contents(tmp_path).version("config.json") == "v1"


def test_a_second_fetch_into_a_folder_that_is_not_shared_is_refused(hub: ModelHub, tmp_path: Path) -> None:
    with (
        only_fetch(tmp_path),
        pytest.raises(FetchError, match=rf"fetches into {tmp_path} at .*: give each .* --shared"),
    ):
        fetch("hf://org/open", tmp_path)
    assert hub.sent.keys() <= {""}
    assert WEIGHTS in fetch("hf://org/open", tmp_path)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


_LOCK_TWICE_WITHOUT_FLOCK = """
import ctypes, platform, struct, sys
from pathlib import Path
from filelock import FileLock, Timeout
from llmservice_server.fetch.cache import FolderLock

flock = {"x86_64": 73, "aarch64": 32}[platform.machine()]
load_number, equal, give = 0x20, 0x15, 0x06  # a BPF program: flock returns 0, everything else is allowed
code = [(load_number, 0, 0, 0), (equal, 0, 1, flock), (give, 0, 0, 0x00050000), (give, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program)), 0, 0) == 0  # PR_SET_SECCOMP

def acquired(lock):
    try:
        return bool(lock.acquire(timeout=0))
    except Timeout:
        return False

folder = Path(sys.argv[1])
print([acquired(FileLock(folder / "hub.lock", is_singleton=False)) for _ in range(2)])
print([FolderLock(folder, 30.0).try_acquire() for _ in range(2)])
"""


def test_the_lock_holds_where_flock_locks_for_one_host_only(tmp_path: Path) -> None:
    """As on volumes mounted with local locks, where the hub client's lock does not hold (docs/decisions/fetch.md)."""
    command = [sys.executable, "-W", "ignore", "-c", _LOCK_TWICE_WITHOUT_FLOCK, tmp_path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[True, True]", "[True, False]"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _lock(folder: Path, clock: Clock) -> FolderLock:
    return FolderLock(folder, LEASE_S, clock=clock)


def test_one_process_gets_the_lock(tmp_path: Path, clock: Clock) -> None:
    locks = [_lock(tmp_path, clock) for _ in range(10)]
    assert [one.try_acquire() for one in locks].count(True) == 1


def test_a_released_lock_is_free(tmp_path: Path, clock: Clock) -> None:
    first, second = _lock(tmp_path, clock), _lock(tmp_path, clock)
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.check()


def test_a_holder_with_heartbeats_keeps_the_lock(tmp_path: Path, clock: Clock) -> None:
    first, second = _lock(tmp_path, clock), _lock(tmp_path, clock)
    assert first.try_acquire()
    for _ in range(100):
        clock.now += LEASE_S / 6
        assert first.heartbeat()
        assert not second.try_acquire()
    first.check()


def test_without_heartbeats_for_a_lease_one_other_process_gets_the_lock(tmp_path: Path, clock: Clock) -> None:
    first, others = _lock(tmp_path, clock), [_lock(tmp_path, clock) for _ in range(5)]
    assert first.try_acquire()
    assert not any(other.try_acquire() for other in others)
    clock.now += LEASE_S
    assert not any(other.try_acquire() for other in others)
    clock.now += 1
    assert [other.try_acquire() for other in others].count(True) == 1


def test_a_holder_without_heartbeats_for_a_lease_stops_writing(tmp_path: Path, clock: Clock) -> None:
    first, second = _lock(tmp_path, clock), _lock(tmp_path, clock)
    assert first.try_acquire()
    assert not second.try_acquire()
    clock.now += LEASE_S + 1
    with pytest.raises(LockLostError):
        first.check()
    assert second.try_acquire()
    assert not first.heartbeat()
    first.release()
    second.check()
    assert not first.try_acquire()
