from __future__ import annotations

from xml.etree import ElementTree

import pytest

from llmservice_bench.bar_chart import Group, bar_chart


def test_bars_are_as_long_as_their_values_on_one_scale_for_all_groups() -> None:
    svg = bar_chart(
        "t", "s", [Group("float32", {"ours": 400.0, "theirs": 100.0}), Group("bfloat16", {"ours": 800.0})], "ours"
    )
    bars = list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect"))[1:]  # noqa: S314 - our own
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths == pytest.approx([widths[2] / 2, widths[2] / 8, widths[2]], rel=0.01)
    assert len({bar.attrib["fill"] for bar in bars}) == 2
    assert "800" in svg
