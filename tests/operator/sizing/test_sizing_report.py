from __future__ import annotations

import json
from typing import Any

import pytest

from llmservice_operator.sizing.sizing_report import parse_report, reported_sizing

MIB = 2**20
TOLD: dict[str, Any] = {
    "max_num_seqs": 7,
    "max_model_len": 256,
    "block_size": 16,
    "num_blocks": 1023,
    "memory_bytes": {"weights": 512 * MIB, "kv_cache": 1024 * 16 * 4096, "activations": 256 * MIB, "total": 2**34},
    "shape": None,
}


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"null", b'{"memory_bytes": 3}'])
def test_what_is_no_report_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="no answer of llmservice serve"):
        parse_report(text)


def test_a_shape_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="no answer of llmservice serve: ShapeError"):
        parse_report(json.dumps({**TOLD, "shape": {"layers": 2}}).encode())


def test_a_model_that_the_planner_does_not_know_is_shown_by_what_its_server_found() -> None:
    status = reported_sizing(parse_report(json.dumps(TOLD).encode()))

    assert (status.source, status.limited_by) == ("pod", "server")
    assert (status.max_num_seqs, status.max_model_len, status.blocks) == (7, 256, 1024)
    assert (status.weights_gib, status.overhead_gib, status.kv_pool_gib) == (0.5, 0.25, 0.06)
    assert status.kv_bytes_per_token == 4096
