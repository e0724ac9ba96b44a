"""docs/metrics.md says what the registries say."""

from __future__ import annotations

import metrics_tables
import pytest


def test_the_page_lists_every_metric_with_its_labels_and_meaning() -> None:
    text = metrics_tables.PAGE.read_text(encoding="utf-8")

    assert metrics_tables.page(text) == text, "run `make docs`"
    for registry in metrics_tables.registries().values():
        names = [family.name for family in registry.collect()]
        assert names
        assert [name for name in names if name not in text] == []


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table between `<!-- server -->`"):
        metrics_tables.page("# Metrics")
