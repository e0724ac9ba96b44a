"""Servers are killed, a change rolls out, and replicas come and go, while requests stream in steadily."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from harness.cluster import Cluster
from harness.kube import Kube, is_ready, tiny_service
from harness.traffic import traffic
from harness.wait import wait_for

NAME = "unrest"
RATE = 10.0
OUTPUT_TOKENS = 60
KILL_EVERY_S = 7.0
SETTLING_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def service(cluster: Cluster) -> None:
    if not cluster.is_local:
        pytest.skip("servers of a cluster that is not ours are not killed")
    kube = Kube(cluster)
    kube.create(tiny_service(NAME, cluster.model_uri, replicas=3))
    wait_for(lambda: ready_pods(kube) == 3, 90, lambda: kube.pods(NAME))


def ready_pods(kube: Kube) -> int:
    return sum(is_ready(pod) and "deletionTimestamp" not in pod["metadata"] for pod in kube.pods(NAME))


@contextmanager
def killing(cluster: Cluster) -> Iterator[list[int]]:
    """SIGKILL for a server process drawn at random, again and again; yields the processes that were killed."""
    killed: list[int] = []
    stop = threading.Event()
    dice = random.Random(3)  # noqa: S311 - faults, not secrets

    def kill() -> None:
        while not stop.wait(KILL_EVERY_S):
            servers = cluster.server_processes()
            if len(servers) > 1:  # a single one may be starting
                with suppress(ProcessLookupError):
                    os.kill(victim := dice.choice(servers), signal.SIGKILL)
                    killed.append(victim)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join(timeout=10)


@pytest.mark.parametrize("seconds", [10, pytest.param(120, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_requests_that_have_not_begun_to_stream_survive(cluster: Cluster, kube: Kube, seconds: int) -> None:
    with traffic(cluster.gateway_url, NAME, RATE, OUTPUT_TOKENS) as load, killing(cluster) as killed:
        until_s = time.monotonic() + seconds
        seqs = 5
        while time.monotonic() < until_s:
            for replicas in (1, 4, 3):
                kube.patch(NAME, {"spec": {"replicas": replicas}})
                wait_for(lambda count=replicas: ready_pods(kube) >= min(count, 2), SETTLING_S, lambda: kube.pods(NAME))
            seqs = 11 - seqs
            kube.patch(NAME, {"spec": {"engine": {"maxNumSeqs": seqs}}})
            wait_for(lambda: ready_pods(kube) >= 2, SETTLING_S, lambda: kube.pods(NAME))
    assert killed
    assert len(load.records) > seconds * RATE / 4
    errors = Counter((record.error, record.ttft_s > 0) for record in load.records if record.error is not None)
    assert set(errors) <= {("error in the stream: upstream_broke_off", True)}, errors
