from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from llmservice_operator.monitoring import promql

QUERIES = promql.service_queries("ns", "chat", 60)


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        ("llama3-8b", '"llama3-8b"'),
        ('a"} or vector(1) #', r'"a\"} or vector(1) #"'),
        ("back\\slash", r'"back\\slash"'),
        ("two\nlines", r'"two\nlines"'),
    ],
)
def test_a_name_stays_inside_its_quotes(text: str, literal: str) -> None:
    assert promql.string(text) == literal


def test_a_selector_without_matchers_is_the_bare_metric() -> None:
    assert promql.selector("up") == "up"
    assert promql.selector("up", "", promql.matchers(job="a", pod="b")) == 'up{job="a",pod="b"}'


@pytest.mark.parametrize(
    ("pod", "ours"),
    [
        ("chat-5d4f8c7b9-abcde", True),
        ("chat-vabcde", True),
        ("chat-big-5d4f8c7b9-abcde", False),
        ("my-chat-5d4f8c7b9-abcde", False),
        ("chat", False),
    ],
)
def test_the_selector_takes_a_services_own_pods(pod: str, ours: bool) -> None:
    pattern = re.search(r'pod=~"([^"]*)"', QUERIES["kvCache"])

    assert pattern is not None
    assert bool(re.fullmatch(pattern[1], pod)) == ours


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH: make tools")
def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    rules = "".join(f"  - record: a:b{n}\n    expr: '{query}'\n" for n, query in enumerate(QUERIES.values()))
    path = tmp_path / "rules.yaml"
    path.write_text(f"groups:\n- name: signals\n  rules:\n{rules}")

    checked = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(("counts_batch", "matcher"), [(True, ""), (False, ',lane!="batch"')])
def test_the_batch_lane_is_left_out_where_it_adds_no_replicas(counts_batch: bool, matcher: str) -> None:
    queries = promql.service_queries("ns", "chat", 60, counts_batch=counts_batch)

    assert ('lane!="batch"' in queries["utilization"]) == bool(matcher)
    assert f'-[a-z0-9]+(-[a-z0-9]+)?"{matcher}}}) / count(' in queries["queue"]
