"""Downloads over a network that interrupts, corrupts and delays."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.stores.file_server import Fault
from harness.stores.model_hub import ModelHub
from llmservice_server.fetch.cache import Contents
from llmservice_server.fetch.checkpoint import fetch, remote_source
from llmservice_server.fetch.download import Downloader, FetchOptions
from llmservice_server.fetch.progress import Progress
from llmservice_server.fetch.source import FetchError

WEIGHTS = "model.safetensors"
URI = "hf://org/open"

Fetched = Callable[[str], dict[str, bytes]]


def _ranges(hub: ModelHub) -> list[str | None]:
    return [request.range for request in hub.seen if request.path.endswith(f"/{WEIGHTS}")]


def test_an_interrupted_download_continues_with_the_next_byte(hub: ModelHub, fetched: Fetched) -> None:
    hub.faults[WEIGHTS] = [Fault(cut_after=100_000), Fault(cut_after=50_000)]
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]
    assert _ranges(hub) == [None, "bytes=100000-", "bytes=150000-"]
    assert hub.sent[WEIGHTS] == len(hub.files[WEIGHTS])


def test_a_silent_connection_is_closed_and_the_download_continued(hub: ModelHub, fetched: Fetched) -> None:
    hub.faults[WEIGHTS] = [Fault(cut_after=100_000, silent=True)]
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]
    assert _ranges(hub) == [None, "bytes=100000-"]


@pytest.mark.slow
def test_a_server_that_stays_silent_is_reported(hub: ModelHub, fetched: Fetched) -> None:
    hub.faults[WEIGHTS] = [Fault(cut_after=0, silent=True)] * 3
    with pytest.raises(FetchError, match=r"the connection broke \(ReadTimeout\) \(3 attempts without a new byte\)"):
        fetched(URI)


def test_the_next_run_continues_a_partial_file(hub: ModelHub, fetched: Fetched) -> None:
    hub.faults[WEIGHTS] = [Fault(cut_after=100_000), *[Fault(status=503)] * 2]
    with pytest.raises(FetchError, match=r"HTTP 503 \(3 attempts without a new byte\)"):
        fetched(URI)
    hub.seen.clear()
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]
    assert _ranges(hub) == ["bytes=100000-"]


def test_without_support_for_ranges_the_download_starts_again(hub: ModelHub, fetched: Fetched) -> None:
    hub.ranges = False
    hub.faults[WEIGHTS] = [Fault(cut_after=100_000)]
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]
    assert hub.sent[WEIGHTS] == 100_000 + len(hub.files[WEIGHTS])


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_corrupt_file_is_downloaded_again(hub: ModelHub, fetched: Fetched, name: str) -> None:
    hub.faults[name] = [Fault(corrupt=True)]
    assert fetched(URI)[name] == hub.files[name]


def test_a_corrupt_partial_file_is_downloaded_again(hub: ModelHub, fetched: Fetched, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = [Fault(cut_after=100_000), *[Fault(status=503)] * 2]
    with pytest.raises(FetchError):
        fetched(URI)
    (part,) = (tmp_path / "model").glob(f".{WEIGHTS}.*.part")
    part.write_bytes(b"x" * 100_000)
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]


def test_a_file_of_another_revision_and_equal_size_is_replaced(hub: ModelHub, fetched: Fetched) -> None:
    fetched(f"{URI}@v1")
    hub.files |= {WEIGHTS: b"WEIGHTS" * 40_000, "config.json": b"[]"}
    hub.sent.clear()
    found = fetched(f"{URI}@main")
    assert found == {name: hub.files[name] for name in found}
    assert "tokenizer.json" not in hub.sent


def test_files_of_an_interrupted_download_are_not_mixed_with_those_of_a_later_version(
    hub: ModelHub, fetched: Fetched, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    for name, content in {WEIGHTS: b"WEIGHTS" * 40_000, "config.json": hub.files["config.json"]}.items():
        (tmp_path / "model" / name).write_bytes(content)
    found = fetched(URI)
    assert found == {name: hub.files[name] for name in found}
    assert "config.json" not in hub.sent


def test_a_folder_is_not_complete_while_another_revision_replaces_its_files(
    hub: ModelHub, fetched: Fetched, tmp_path: Path
) -> None:
    first = dict(hub.files)
    fetched(f"{URI}@v1")
    hub.files |= {WEIGHTS: b"WEIGHTS" * 40_000, "config.json": b"[]"}
    hub.faults["config.json"] = [Fault(status=503)]
    with pytest.raises(FetchError, match="HTTP 503"):
        fetch(f"{URI}@main", tmp_path / "model", FetchOptions(parallel=1, attempts=1))
    assert (tmp_path / "model" / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    hub.files = first
    found = fetched(f"{URI}@v1")
    assert found == {name: first[name] for name in found}


def test_a_recorded_version_is_not_read_again(hub: ModelHub, fetched: Fetched, tmp_path: Path) -> None:
    fetched(f"{URI}@v1")
    damaged = b"x" * len(hub.files[WEIGHTS])
    (tmp_path / "model" / WEIGHTS).write_bytes(damaged)
    assert fetched(f"{URI}@main")[WEIGHTS] == damaged
    (tmp_path / "model" / WEIGHTS).unlink()
    assert fetched(f"{URI}@main")[WEIGHTS] == hub.files[WEIGHTS]


def test_repeated_corruption_is_reported(hub: ModelHub, fetched: Fetched, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = [Fault(corrupt=True)] * 3
    with pytest.raises(FetchError, match=r"model.safetensors: its sha256 is \w+, expected \w+, 3 times in a row"):
        fetched(URI)
    assert not (tmp_path / "model" / WEIGHTS).exists()


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_temporary_error_is_retried(hub: ModelHub, fetched: Fetched, status: int) -> None:
    hub.faults[WEIGHTS] = [Fault(status=status, headers=(("Retry-After", "1"),))]
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]


@pytest.mark.parametrize(("status", "words"), [(403, "is gated or private"), (404, "has no file model.safetensors")])
def test_a_lasting_error_is_reported_at_once(hub: ModelHub, fetched: Fetched, status: int, words: str) -> None:
    hub.faults[WEIGHTS] = [Fault(status=status)]
    with pytest.raises(FetchError, match=words):
        fetched(URI)
    assert len(_ranges(hub)) == 1


def test_a_disk_that_is_too_small_is_reported_before_the_download(
    hub: ModelHub, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(FetchError, match=r"needs 0.00 GiB more, 0.00 GiB is free in .*model: give the node"):
        fetched(URI)
    assert WEIGHTS not in hub.sent


def test_a_disk_that_fills_up_is_reported_and_no_file_gets_its_final_name(
    hub: ModelHub, fetched: Fetched, tmp_path: Path
) -> None:
    hub.faults[WEIGHTS] = [Fault(status=503)] * 3
    with pytest.raises(FetchError, match="HTTP 503"):
        fetched(URI)
    (part,) = (tmp_path / "model").glob(f".{WEIGHTS}.*.part")
    part.unlink()
    part.symlink_to("/dev/full")  # returns ENOSPC

    with pytest.raises(FetchError, match=r"needs 0.00 GiB more, \S+ GiB is free in .*model: give the node"):
        fetched(URI)
    assert not (tmp_path / "model" / WEIGHTS).exists()
    part.unlink()
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]


def _append(part: Path) -> None:
    with part.open("ab") as written:
        written.write(b"x")


@pytest.mark.parametrize("other", [_append, Path.unlink])
@pytest.mark.usefixtures("hub")
def test_another_process_that_changes_partial_files_is_noticed(tmp_path: Path, other: Callable[[Path], None]) -> None:
    """As on file systems without flock."""

    def interfere() -> None:  # before each write
        for part in tmp_path.glob(".*.part"):
            other(part)

    source = remote_source(URI, 5.0)
    files = source.describe([name for name in source.names() if name == WEIGHTS])
    download = Downloader(source, tmp_path, Contents(tmp_path), Progress(), FetchOptions(), interfere)
    with pytest.raises(FetchError, match=r"another process fetches into .* at the same time: give each .* --shared"):
        download.run(files)
    assert not (tmp_path / WEIGHTS).exists()
