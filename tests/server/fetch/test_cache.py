"""A cache that ten processes fetch into at once, one of which is killed: the real command, a slow hub."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from harness.model_hub import ModelHub
from llmservice_server.fetch.cache import completed, mark_completed

LLMSERVICE = Path(sys.executable).with_name("llmservice")
WEIGHTS = "model.safetensors"
DEADLINE_S = 60.0


def _start(cache: Path) -> subprocess.Popen[bytes]:
    command = [LLMSERVICE, "fetch", "hf://org/open", cache, "--shared", "--lease", "2"]
    return subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL)


def _wait_for_part(cache: Path, at_least: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while sum(part.stat().st_size for part in cache.glob(f".{WEIGHTS}.*.part")) < at_least:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ten_processes_download_once_though_the_first_is_killed_midway(hub: ModelHub, tmp_path: Path) -> None:
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
    assert sum(asked.path.endswith(f"/{WEIGHTS}") for asked in hub.seen) == 2
    assert completed(cache, "hf://org/open") is not None


def test_a_pod_that_is_told_to_go_leaves_the_lock_to_the_next_at_once(hub: ModelHub, tmp_path: Path) -> None:
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


def test_a_folder_is_complete_for_its_own_uri_and_while_no_file_is_short(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    assert completed(tmp_path, "hf://a/b") is None
    mark_completed(tmp_path, "hf://a/b", ["config.json"])
    assert completed(tmp_path, "hf://a/b") == ["config.json"]
    assert completed(tmp_path, "hf://a/c") is None
    (tmp_path / "config.json").write_bytes(b"")
    assert completed(tmp_path, "hf://a/b") is None
