"""The parts of the GPU benchmark that need no GPU: failures, time limits, logs and the report."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import harness.gpu.triton_interpreter  # noqa: F401 - what the sections import is not compiled
from gpu import recorded, table, write
from gpu_bench import worker
from gpu_bench.relay import Attempt, State, Watch, Worker, relay
from gpu_bench.sections import Findings, SectionLog, SectionWriter, run_in_turn
from llmservice_bench.results import Check

pytestmark = pytest.mark.slow

EXPECTED_S = {"first": 10.0, "second": 10.0}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def of(part: str) -> Findings:
    return Findings(rows=[{"part": part}], checks=[Check(part, "= 1", 1.0)], notes=[f"{part} is fine"])


def test_a_failed_section_is_reported_and_the_next_one_runs() -> None:
    def fails() -> Findings:
        raise ValueError("no such kernel")

    found = dict(run_in_turn({"first": fails, "second": lambda: of("second")}, EXPECTED_S, 60, clock=Clock()))
    assert found["first"].notes == ["first failed: ValueError: no such kernel"]
    assert [(check.what, check.met) for check in found["first"].checks] == [("first completed", False)]
    assert found["second"].rows[0] == {"part": "second"}


def test_only_sections_that_fit_the_time_limit_are_started() -> None:
    clock, begun = Clock(), list[str]()

    def takes(seconds: float) -> Callable[[], Findings]:
        def section() -> Findings:
            clock.now += seconds
            return Findings()

        return section

    there = {"first": takes(30), "long": takes(40), "short": takes(20), "late": takes(20)}
    expected_s = {"first": 25, "long": 40, "short": 20, "late": 20}
    found = dict(run_in_turn(there, expected_s, 60, begun.append, clock))
    assert begun == ["first", "short"]
    assert found["first"].rows == [{"part": "time", "section": "first", "s": 30, "expected s": 25}]
    assert found["long"].notes == ["long was not run: no time was left"]
    assert not found["late"].checks[0].met


def test_a_log_is_read_without_its_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    writer = SectionWriter(path)
    writer.gpu("NVIDIA H200")
    writer.begun("start")
    writer.done("start", of("start"))
    writer.begun("steps")
    with path.open("a") as file:
        file.write('{"done": "steps", "ro')
    log = SectionLog.read(path)
    assert log == SectionLog("NVIDIA H200", {"start": of("start")}, "steps")


class Processes:
    """Each follows its script: the sections that it completes, then the one in which it crashes, if any."""

    def __init__(self, clock: Clock, *scripts: tuple[Sequence[str], str | None], takes_s: float = 10.0) -> None:
        self.clock, self.scripts, self.takes_s = clock, list(scripts), takes_s
        self.asked: list[tuple[list[str], float]] = []

    def __call__(self, names: Sequence[str], seconds: float, watch: Watch) -> Attempt:
        self.asked.append((list(names), seconds))
        self.clock.now += self.takes_s
        ended, dies_in = self.scripts.pop(0)
        log = SectionLog("H200")
        for name in ended:
            log.done[name] = of(name)
            watch(log)
        log.begun = dies_in
        watch(log)
        return Attempt(log, "its process ended with status 1")


def together(state: State) -> Findings:
    whole = Findings()
    for found in state.found.values():
        whole.add(found)
    return whole


def test_after_a_crash_the_next_process_runs_the_remaining_sections() -> None:
    clock = Clock()
    processes = Processes(clock, (["a"], "b"), (["c", "d"], None))
    on_progress: list[State] = []
    state = relay(["a", "b", "c", "d"], processes, 100, on_progress.append, clock)
    found = together(state)
    assert (state.gpu, state.left) == ("H200", ())
    assert processes.asked == [(["a", "b", "c", "d"], 100), (["c", "d"], 90)]
    assert [row["part"] for row in found.rows] == ["a", "c", "d"]
    assert "b failed: its process ended with status 1" in found.notes
    assert [check.what for check in found.checks if not check.met] == ["b completed"]
    assert [([*each.found], each.left) for each in on_progress] == [
        (["a"], ("b", "c", "d")), (["a", "b", "c"], ("d",)), (["a", "b", "c", "d"], ()),
    ]  # fmt: skip


def test_an_end_between_two_sections_fails_none_of_them() -> None:
    clock = Clock()
    found = together(relay(["a", "b"], Processes(clock, (["a"], None), (["b"], None)), 100, clock=clock))
    assert [row["part"] for row in found.rows] == ["a", "b"]
    assert all(check.met for check in found.checks)


def test_no_process_is_started_in_the_last_seconds_and_missing_sections_are_reported() -> None:
    clock = Clock()
    found = together(relay(["a", "b", "c"], Processes(clock, (["a"], "b"), takes_s=85), 100, clock=clock))
    assert "c was not run: no time was left" in found.notes
    assert [check.what for check in found.checks if not check.met] == ["b completed", "c was started in time"]


def test_a_process_that_starts_no_section_is_not_started_again() -> None:
    clock = Clock()
    processes = Processes(clock, ([], None))
    found = together(relay(["a", "b"], processes, 100, clock=clock))
    assert len(processes.asked) == 1
    assert found.notes == ["the run failed: its process ended with status 1 before it started a section"]


SCRIPT = """
import json, os, sys, time
log, names = sys.argv[2], sys.argv[5:]
with open(log, "a") as file:
    for name in names:
        print(json.dumps({"begun": name}), file=file, flush=True)
        if name == "dies": os._exit(9)
        if name == "hangs": time.sleep(600)
        found = {"rows": [{"part": name}], "checks": [], "notes": [], "ran": True}
        print(json.dumps({"done": name, **found}), file=file, flush=True)
"""


def ignore(_: SectionLog) -> None:
    """Ignores the log."""


def test_a_crashed_process_leaves_its_findings(tmp_path: Path) -> None:
    attempt = Worker([sys.executable, "-c", SCRIPT], {}, tmp_path / "log")(["good", "dies", "never"], 60.0, ignore)
    assert attempt.log.done["good"].rows == [{"part": "good"}]
    assert (attempt.log.begun, attempt.end) == ("dies", "its process ended with status 9")


def test_a_hung_process_is_killed_at_the_time_limit(tmp_path: Path) -> None:
    attempt = Worker([sys.executable, "-c", SCRIPT], {}, tmp_path / "log")(["hangs"], 0.2, ignore)
    assert attempt.end == "the time limit was reached while it ran"


WITHOUT = """
import sys
for absent in (
    "aiohttp fastapi httpx httpx2 huggingface_hub kubernetes llguidance llvmlite numba opentelemetry prometheus_client "
    "rich starlette uvicorn uvloop yaml zmq"
).split():
    sys.modules[absent] = None
sys.path[:0] = [f"{sys.argv[1]}/{package}" for package in ("planner", "server", "benchmarks")]
from gpu_bench import device, worker
worker.sections()
"""


def test_the_worker_imports_few_packages() -> None:
    """A machine with a GPU may have neither an HTTP server nor numba."""
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", WITHOUT, root], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_worker_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert worker.main(["ceilings"], 1.0, tmp_path, SectionWriter(tmp_path / "log"), rehearse=False) == worker.NO_GPU
    assert "torch finds none" in capsys.readouterr().err


def test_sections_that_are_not_run_keep_their_results_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, failed = Findings.of_lack_of_time("steps"), Findings.of_failure("the run", "no section was started")
    for commit, gpu, found in (
        ("old", "H200", {"start": of("a"), "steps": of("b"), "families": of("c"), "the run": failed}),
        ("new", "H200", {"start": of("d"), "steps": late}),
    ):
        monkeypatch.setattr("gpu.commit", lambda commit=commit: commit)
        write(State(gpu, found, ()), "a toy", tmp_path, recorded(tmp_path / "gpu.json", gpu))
    assert recorded(tmp_path / "gpu.json", "H100") == {}
    sections = recorded(tmp_path / "gpu.json", "H200")
    assert {name: (time["commit"], part) for name, (time, part) in sections.items()} == {
        "start": ("new", of("d")), "steps": ("old", of("b")), "families": ("old", of("c"))
    }  # fmt: skip


def test_the_report_names_the_gpu_and_missed_targets() -> None:
    found = Findings([{"part": "step", "ms": 1.23456}], [Check("share", ">= 0.75", 0.5)], ["late was not run"])
    text = table("NVIDIA H200", found)
    assert text.startswith("# On NVIDIA H200\n")
    assert "| share | >= 0.75  | 0.5 | **MISSED** |" in text
    assert "- late was not run" in text
    assert "- part step, ms 1.235" in text
