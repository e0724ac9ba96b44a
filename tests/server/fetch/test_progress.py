from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from llmservice_server.fetch.progress import Progress, serve_progress

GIB = 1 << 30


def test_present_bytes_do_not_count_for_rate_and_remaining_time() -> None:
    now = [0.0]
    progress = Progress(lambda: now[0])
    progress.begin({"a": GIB, "b": 0}, 4 * GIB)
    now[0] = 2.0
    progress.at("b", GIB)
    seen = progress.snapshot()
    assert (seen.percent, seen.bytes_per_s, seen.eta_s) == (50, GIB / 2, 4.0)
    assert str(seen) == "2.00 of 4.00 GiB (50 %), 512.0 MiB/s, 4 s left"


def test_a_stalled_download_has_no_remaining_time() -> None:
    now = [0.0]
    progress = Progress(lambda: now[0])
    progress.begin({}, GIB)
    progress.at("a", GIB // 2)
    for _ in range(40):
        now[0] += 1.0
        seen = progress.snapshot()
    assert (seen.bytes_per_s, seen.eta_s) == (0.0, None)


def test_only_progress_is_served_over_http() -> None:
    progress = Progress()
    progress.begin({"a": 25}, 100)
    with serve_progress(progress, "127.0.0.1", 0) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=5) as answer:
            served = json.load(answer)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/etc/passwd", timeout=5)
        refused.value.close()
    assert (served["phase"], served["done_bytes"], served["total_bytes"]) == ("downloading", 25, 100)
    assert refused.value.code == 404
