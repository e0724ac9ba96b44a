"""The highest number of a row is found wherever it lies."""

from typing import Any

import numpy as np

from llmservice_server.backend.cpu.compiled import compiled
from llmservice_server.backend.cpu.panel_product import PANEL
from llmservice_server.backend.cpu.row import highest_of


@compiled()
def _highest(rows: Any, highest: Any) -> None:
    for number in range(len(rows)):
        highest[number] = highest_of(rows[number])


def test_the_highest_number_is_found_in_every_place() -> None:
    rows = np.random.default_rng(0).standard_normal((PANEL, PANEL)).astype(np.float32) - 10
    rows[np.arange(PANEL), np.arange(PANEL)] = np.arange(PANEL)
    highest = np.empty(PANEL, np.float32)
    _highest(rows, highest)
    np.testing.assert_array_equal(highest, np.arange(PANEL))


def test_all_may_be_infinite() -> None:
    rows = np.full((1, PANEL), -np.inf, np.float32)
    highest = np.zeros(1, np.float32)
    _highest(rows, highest)
    assert highest[0] == -np.inf
