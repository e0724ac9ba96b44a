from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from llmservice_operator.signals.service_queries import ServiceQueries


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
    pattern = re.search(r'pod=~"([^"]*)"', ServiceQueries("ns", "chat", 60).selector)

    assert pattern is not None
    assert bool(re.fullmatch(pattern[1], pod)) == ours


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH: make tools")
def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    queries = ServiceQueries("ns", "chat", 60)
    asked = [queries.waiting(), queries.utilization(8), queries.kv_cache(), queries.arrivals(), queries.ttft_p99()]
    rules = "".join(f"  - record: a:b{n}\n    expr: '{query}'\n" for n, query in enumerate(asked))
    path = tmp_path / "rules.yaml"
    path.write_text(f"groups:\n- name: signals\n  rules:\n{rules}")

    checked = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(("counts_batch", "matcher"), [(True, ""), (False, ',lane!="batch"')])
def test_the_batch_lane_is_left_out_where_it_adds_no_replicas(counts_batch: bool, matcher: str) -> None:
    queries = ServiceQueries("ns", "chat", 60, counts_batch)

    for query in (queries.waiting(), queries.utilization(8)):
        assert ('lane!="batch"' in query) == bool(matcher)
    assert f'-[a-z0-9]+(-[a-z0-9]+)?"{matcher}}}) / count(' in queries.waiting()
