from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from llmservice_local.node.process import Process
from llmservice_local.node.shim import PERIOD_S, Throttle

BURN = """
import threading, time
def burn():
    while time.monotonic() < end: pass
end = time.monotonic() + 2.0
began, used = time.monotonic(), time.process_time()
threads = [threading.Thread(target=burn) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print((time.process_time() - used) / (time.monotonic() - began))
"""


class Meter(Throttle):
    """A throttle whose tree is a number that the test moves."""

    def __init__(self, cores: float) -> None:
        super().__init__(cores, 0.0)
        self.used_s = 0.0
        self.signals: list[int] = []
        self._read_s = 0.0

    def _refresh(self) -> None:
        self._used = {1: 0.0}

    def _consumed(self) -> float:
        consumed_s, self._read_s = self.used_s - self._read_s, self.used_s
        return consumed_s

    def _signal(self, number: int) -> None:
        self.signals.append(number)


def test_tree_is_stopped_when_its_quota_is_used_and_goes_on_at_the_next_period() -> None:
    meter = Meter(0.5)
    meter.step(0.0)
    meter.used_s = 0.05
    assert meter.step(0.05) == pytest.approx(PERIOD_S - 0.05)
    assert meter.stopped
    meter.step(PERIOD_S)
    assert not meter.stopped


def test_time_used_in_excess_reduces_the_next_quota() -> None:
    meter = Meter(0.5)
    meter.used_s = 0.12  # 70 ms over the quota of 50 ms: the next period's quota does not cover it
    meter.step(0.09)
    meter.step(PERIOD_S)
    assert meter.stopped
    meter.step(2 * PERIOD_S)
    assert not meter.stopped


def test_idle_time_is_not_saved_up() -> None:
    meter = Meter(0.5)
    meter.step(10.0)
    meter.used_s = 0.06
    meter.step(10.01)
    assert meter.stopped


@pytest.mark.parametrize("cores", [0.2, 2.0])
def test_random_load_never_gets_more_than_its_share(cores: float) -> None:
    meter, now, demand = Meter(cores), 0.0, 1.5  # a load that would take one and a half cores
    while now < 20:
        wait_s = meter.step(now)
        if not meter.stopped:
            meter.used_s += demand * wait_s
        now += wait_s
    assert meter.used_s / 20 == pytest.approx(min(cores, demand), rel=0.05)


@pytest.mark.slow
async def test_real_threads_share_the_limit_of_their_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = await Process.start([sys.executable, "-c", BURN], env=os.environ, log=log, cpu_limit=0.3)
    assert await process.wait() == 0
    cores = float(log.read_text(encoding="utf-8"))
    assert cores < 0.45  # without the limit it is near the machine's free cores; a busy machine only lowers it
