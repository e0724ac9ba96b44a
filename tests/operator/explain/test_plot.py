from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmservice_operator.explain.plot import check, text_plot, write_plot
from llmservice_operator.explain.timeline import Timeline
from llmservice_planner.charts import ChartError

HOUR = Timeline(
    source="Prometheus at http://prometheus:9090",
    minutes=(-60.0, -30.0, 0.0),
    load=(1.2, 3.4, 2.0),
    asked=(2.0, 5.0, 4.0),
    ready=(2.0, 4.0, 4.0),
    demand=(1200.0, 3400.0, 2000.0),
    capacity=(2000.0, 4000.0, 4000.0),
    ttft_p99_s=(0.4, 3.1, None),
    ttft_target_s=2.0,
)
NOTHING = Timeline("the decisions in the status", (-60.0, 0.0), (None, None), (None, None), ttft_target_s=2.0)


def test_the_hour_is_charted_as_text_with_what_is_known() -> None:
    text = "\n".join(text_plot(HOUR))

    assert text.startswith("Last hour, from Prometheus at http://prometheus:9090")
    for shown in ("tokens per second", "replicas asked for", "load (busy replicas)", "TTFT, seconds", "min from now"):
        assert shown in text
    assert max(map(len, text.splitlines())) <= 100
    assert "tokens per second" not in "\n".join(text_plot(replace(HOUR, demand=(), capacity=())))
    assert list(text_plot(NOTHING)) == []


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html"])
def test_the_hour_is_written_to_a_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"hour{suffix}"

    write_plot(HOUR, "chat in team-a", "OK  all is well", path)

    assert path.stat().st_size > 2000
    if suffix == ".html":
        assert "OK  all is well" in path.read_text()
        assert "<svg" in path.read_text()


def test_a_file_that_cannot_be_written_is_refused_before(tmp_path: Path) -> None:
    with pytest.raises(ChartError, match=r"ends in \.gif, expected \.svg, \.png or \.html"):
        check(tmp_path / "hour.gif")
    with pytest.raises(ChartError, match="is no folder"):
        check(tmp_path / "nowhere" / "hour.html")
    for suffix in (".svg", ".html"):
        (tmp_path / f"folder{suffix}").mkdir()
        with pytest.raises(ChartError, match="cannot be written: Is a directory"):
            write_plot(HOUR, "chat", "Serving", tmp_path / f"folder{suffix}")
    with pytest.raises(ChartError, match="nothing to plot yet"):
        write_plot(NOTHING, "chat", "", tmp_path / "hour.svg")
