"""Downloads over networks that cut, corrupt, refuse and dawdle."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.file_server import Fault
from harness.model_hub import ModelHub
from llmservice_server.fetch.error import FetchError
from llmservice_server.fetch.retry import RetryPolicy

WEIGHTS = "model.safetensors"
URI = "hf://org/open"

Fetched = Callable[[str], dict[str, bytes]]


def _ranges(hub: ModelHub) -> list[str | None]:
    return [asked.range for asked in hub.seen if asked.path.endswith(f"/{WEIGHTS}")]


def test_a_cut_connection_is_continued_where_it_broke_off(hub: ModelHub, fetched: Fetched) -> None:
    hub.faults[WEIGHTS] = [Fault(cut_after=100_000), Fault(cut_after=50_000)]
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]
    assert _ranges(hub) == [None, "bytes=100000-", "bytes=150000-"]
    assert hub.sent[WEIGHTS] == len(hub.files[WEIGHTS])


def test_a_connection_that_falls_silent_is_given_up_and_continued(hub: ModelHub, fetched: Fetched) -> None:
    hub.faults[WEIGHTS] = [Fault(cut_after=100_000, silent=True)]
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]
    assert _ranges(hub) == [None, "bytes=100000-"]


def test_a_server_that_stays_silent_is_told(hub: ModelHub, fetched: Fetched) -> None:
    hub.faults[WEIGHTS] = [Fault(cut_after=0, silent=True)] * 3
    with pytest.raises(FetchError, match=r"the connection broke \(ReadTimeout\) \(3 attempts without a new byte\)"):
        fetched(URI)


def test_what_a_killed_run_left_is_continued_by_the_next(hub: ModelHub, fetched: Fetched) -> None:
    hub.faults[WEIGHTS] = [Fault(cut_after=100_000), *[Fault(status=503)] * 2]
    with pytest.raises(FetchError, match=r"HTTP 503 \(3 attempts without a new byte\)"):
        fetched(URI)
    hub.seen.clear()
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]
    assert _ranges(hub) == ["bytes=100000-"]


def test_a_hub_without_ranges_is_read_from_the_beginning(hub: ModelHub, fetched: Fetched) -> None:
    hub.ranges = False
    hub.faults[WEIGHTS] = [Fault(cut_after=100_000)]
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]
    assert hub.sent[WEIGHTS] == 100_000 + len(hub.files[WEIGHTS])


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_flipped_bit_is_noticed_and_the_file_fetched_anew(hub: ModelHub, fetched: Fetched, name: str) -> None:
    hub.faults[name] = [Fault(corrupt=True)]
    assert fetched(URI)[name] == hub.files[name]


def test_a_bit_flipped_before_the_cut_is_noticed_as_well(hub: ModelHub, fetched: Fetched, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = [Fault(cut_after=100_000), *[Fault(status=503)] * 2]
    with pytest.raises(FetchError):
        fetched(URI)
    (part,) = (tmp_path / "model").glob(f".{WEIGHTS}.*.part")
    part.write_bytes(b"x" * 100_000)
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]


def test_corruption_that_stays_is_told(hub: ModelHub, fetched: Fetched, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = [Fault(corrupt=True)] * 3
    with pytest.raises(FetchError, match=r"model.safetensors: its sha256 is \w+, expected \w+, 3 times in a row"):
        fetched(URI)
    assert not (tmp_path / "model" / WEIGHTS).exists()


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_passing_refusal_is_tried_again(hub: ModelHub, fetched: Fetched, status: int) -> None:
    hub.faults[WEIGHTS] = [Fault(status=status, headers=(("Retry-After", "1"),))]
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]


@pytest.mark.parametrize(("status", "words"), [(403, "is gated or private"), (404, "has no file model.safetensors")])
def test_a_lasting_refusal_is_told_at_once(hub: ModelHub, fetched: Fetched, status: int, words: str) -> None:
    hub.faults[WEIGHTS] = [Fault(status=status)]
    with pytest.raises(FetchError, match=words):
        fetched(URI)
    assert len(_ranges(hub)) == 1


def test_a_disk_that_is_too_small_is_told_before_anything_is_downloaded(
    hub: ModelHub, fetched: Fetched, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(FetchError, match=r"needs 0.00 GiB more, 0.00 GiB is free in .*model: give the node"):
        fetched(URI)
    assert WEIGHTS not in hub.sent


def test_a_disk_that_fills_up_in_mid_write_is_told_and_nothing_takes_the_real_name(
    hub: ModelHub, fetched: Fetched, tmp_path: Path
) -> None:
    hub.faults[WEIGHTS] = [Fault(status=503)] * 3
    with pytest.raises(FetchError, match="HTTP 503"):
        fetched(URI)
    (part,) = (tmp_path / "model").glob(f".{WEIGHTS}.*.part")
    part.unlink()
    part.symlink_to("/dev/full")  # the kernel's own ENOSPC

    with pytest.raises(FetchError, match=r"needs 0.00 GiB more, \S+ GiB is free in .*model: give the node"):
        fetched(URI)
    assert not (tmp_path / "model" / WEIGHTS).exists()
    part.unlink()
    assert fetched(URI)[WEIGHTS] == hub.files[WEIGHTS]


@pytest.mark.parametrize(
    ("failures", "retry_after_s", "least", "most"),
    [(1, None, 0.25, 0.5), (4, None, 2.0, 4.0), (20, None, 30.0, 60.0), (1, 7.0, 7.0, 7.0), (1, 3600.0, 60.0, 60.0)],
)
def test_pauses_grow_to_a_bound_and_heed_the_servers_wish(
    failures: int, retry_after_s: float | None, least: float, most: float
) -> None:
    assert least <= RetryPolicy().delay_s(failures, retry_after_s) <= most
