"""`llmservice up` as the demo's child."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmservice_local.demo.up import UpProcess, run_command
from llmservice_planner.command import CommandError, main

pytestmark = pytest.mark.slow


async def test_cluster_that_cannot_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    with pytest.raises(CommandError, match="does not exist"):
        async with UpProcess(log, ("--models-root", str(tmp_path / "absent"))):
            pass
    assert "does not exist" in log.read_text()


async def test_cluster_is_found_by_what_it_prints_and_ends_with_the_block(tmp_path: Path) -> None:
    async with UpProcess(tmp_path / "up.log", ("--state-dir", str(tmp_path / "state"), "--no-operator")) as up:
        assert up.kubeconfig == str(tmp_path / "state" / "kubeconfig")
        assert up.gateway_url.startswith("http://127.0.0.1:")
        assert up.running
    assert not up.running


async def test_failing_subcommand_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="ended with status 2"):
        await run_command("make-tiny-model")


def test_demo_refuses_a_folder_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "examples" / "tiny-llama.yaml"
    assert main(["demo", "--dir", sys.executable, "--manifest", str(example)]) == 2
    assert f"--dir {sys.executable}: [Errno 17] File exists" in capsys.readouterr().err
