"""The Dockerfile's rules, read from its text: there may be no Docker where the tests run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TARGETS = ("operator", "gateway", "server")
COMPILERS = ("gcc", "g++", "clang", "build-essential", "make", "cmake", "nvcc", "devel")


@dataclass
class Stage:
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def last(self, name: str) -> str | None:
        found = [value for instruction, value in self.instructions if instruction == name]
        return found[-1] if found else None


def parse(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """The arguments before the first stage, and the stages by name."""
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(None, map(str.strip, joined.splitlines())):
        instruction, _, value = line.partition(" ")
        if instruction == "FROM":
            base, _, name = value.partition(" AS ")
            current = stages[name] = Stage(base)
        elif current is None:
            key, _, default = value.partition("=")
            arguments[key] = default
        else:
            current.instructions.append((instruction, value))
    return arguments, stages


ARGUMENTS, STAGES = parse((ROOT / "Dockerfile").read_text(encoding="utf-8"))


def resolved(reference: str, arguments: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], reference)


def lineage(name: str, arguments: dict[str, str] | None = None) -> tuple[list[Stage], str]:
    """The stage and those it is built on, youngest first, and the image from outside below them all."""
    found = []
    while name in STAGES:
        found.append(STAGES[name])
        name = resolved(STAGES[name].base, ARGUMENTS | (arguments or {}))
    return found, name


def setting(target: str, instruction: str) -> str | None:
    return next((value for stage in lineage(target)[0] if (value := stage.last(instruction))), None)


@pytest.mark.parametrize("target", TARGETS)
def test_image_runs_the_command_as_a_numeric_user_that_is_not_root(target: str) -> None:
    user = setting(target, "USER")
    assert user is not None
    uid, _, gid = user.partition(":")
    assert int(uid) > 0
    assert int(gid) > 0
    assert json.loads(setting(target, "ENTRYPOINT") or "null") == ["llmservice"]


@pytest.mark.parametrize("name", STAGES)
def test_every_base_is_pinned_to_a_version(name: str) -> None:
    _, image = lineage(name)
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", image)


@pytest.mark.parametrize("target", TARGETS)
def test_no_compiler_reaches_the_final_image(target: str) -> None:
    stages, image = lineage(target)
    assert "slim" in image
    for instruction, value in (entry for stage in stages for entry in stage.instructions):
        assert instruction != "RUN", "the final stages only copy what was built elsewhere"
        assert not any(word in COMPILERS for word in re.split(r"[\s\"',]", value))


@pytest.mark.parametrize("target", TARGETS)
def test_image_holds_its_own_extra_installed_by_the_constraints(target: str) -> None:
    copied = re.fullmatch(r"--from=(\S+) /opt/llmservice /opt/llmservice", STAGES[target].last("COPY") or "")
    assert copied
    install = lineage(copied[1])[0]
    runs = [value for stage in install for name, value in stage.instructions if name == "RUN" and "install" in value]
    assert runs
    for run in runs:
        assert re.search(rf"\[{target}[\],]", run)
        assert "--constraint /constraints.txt" in run


@pytest.mark.parametrize("torch", ["cpu", "cuda"])
def test_server_is_built_for_either_torch(torch: str) -> None:
    stages, _ = lineage("server-environment", {"TORCH": torch})
    assert stages[1] is STAGES[f"server-{torch}-environment"]
    assert ("$TORCH_CPU_INDEX_URL" in str(stages[1].instructions)) is (torch == "cpu")


def test_what_is_copied_exists_and_passes_the_dockerignore() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for stage in STAGES.values():
        for name, value in stage.instructions:
            if name == "COPY" and not value.startswith("--from"):
                *sources, _ = value.split()
                assert set(sources) <= allowed
                assert all((ROOT / source).exists() for source in sources)


def test_dockerignore_leaves_out_everything_that_is_not_named() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
