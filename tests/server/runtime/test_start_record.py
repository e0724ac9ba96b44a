from __future__ import annotations

from pathlib import Path

import pytest

from llmservice_server.runtime.start_record import StartRecord

MIB = 1 << 20


@pytest.fixture
def record(tmp_path: Path) -> StartRecord:
    return StartRecord(tmp_path / "start.json")


def test_each_start_after_a_kill_takes_a_smaller_cache_and_keeps_it(record: StartRecord) -> None:
    assert record.begin(400 * MIB, MIB) == 400 * MIB
    assert record.begin(400 * MIB, MIB) == 300 * MIB, "killed: its end was not recorded"
    assert record.begin(400 * MIB, MIB) == 225 * MIB
    record.end()
    assert record.begin(400 * MIB, MIB) == 225 * MIB, "what was found out is not forgotten"


def test_a_start_that_ended_by_itself_changes_nothing(record: StartRecord) -> None:
    record.begin(400 * MIB, MIB)
    record.end()
    assert record.begin(400 * MIB, MIB) == 400 * MIB


def test_one_request_of_the_full_length_always_fits(record: StartRecord) -> None:
    record.begin(400 * MIB, 350 * MIB)
    assert record.begin(400 * MIB, 350 * MIB) == 350 * MIB
    assert record.begin(200 * MIB, 350 * MIB) == 200 * MIB, "where it ever did"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kv_cache_bytes": "many", "running": true}'])
def test_a_broken_record_is_none(text: str, record: StartRecord) -> None:
    assert record.path is not None
    record.path.write_text(text)
    assert record.begin(400 * MIB, MIB) == 400 * MIB


def test_a_record_that_cannot_be_written_prevents_no_start(tmp_path: Path) -> None:
    record = StartRecord(tmp_path / "absent" / "start.json")
    assert record.begin(400 * MIB, MIB) == 400 * MIB
    record.end()
