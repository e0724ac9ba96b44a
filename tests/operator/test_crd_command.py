from __future__ import annotations

from pathlib import Path

import pytest

from llmservice_operator.api.crd import FILE_NAME, crd_yaml
from llmservice_planner.command import main


def test_crd_prints_the_definition(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd"]) == 0
    assert capsys.readouterr().out == crd_yaml()


def test_check_distinguishes_current_and_outdated_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "crd.yaml"
    path.write_text(crd_yaml())
    assert main(["crd", "--check", str(path)]) == 0

    path.write_text(crd_yaml() + "# edited\n")
    assert main(["crd", "--check", str(path)]) == 1
    assert "make crds" in capsys.readouterr().err


def test_check_of_a_missing_file_is_a_users_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd", "--check", str(tmp_path / "absent")]) == 2
    assert "can't read" in capsys.readouterr().err


def test_write_fills_the_repositorys_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crds").mkdir()
    monkeypatch.chdir(tmp_path)

    assert main(["crd", "--write"]) == 0
    assert (tmp_path / "crds" / FILE_NAME).read_text() == crd_yaml()


def test_write_outside_the_repository_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["crd", "--write"]) == 2
