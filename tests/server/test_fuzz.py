"""Damaged bodies: each is answered below 500, and afterwards the engine is alive and every block free.

`python benchmarks/fuzz_api.py` sends 20,000 of them and measures /health and memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import fuzz_api

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_bodies", [600, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
async def test_damaged_bodies_neither_break_nor_leak_anything(
    start_server: Callable[..., Any], num_bodies: int
) -> None:
    server = start_server("--max-num-seqs", "32").wait_until_ready()
    chance = random.Random(7)  # noqa: S311  # a load, no secret
    statuses = await fuzz_api.send(server.url, [fuzz_api.body(chance) for _ in range(num_bodies)])
    assert statuses.total() == num_bodies
    assert min(statuses[200], statuses[400]) > num_bodies // 10  # both valid and invalid bodies were sent
    server.wait_until_idle()
    assert server.post("/v1/completions", {"model": "tiny", "prompt": "Hello"})[0] == 200
    assert not [line for line in server.log if line["level"] in ("warning", "error")]
    assert server.errors == []
