"""The `llmservice` command with commands that a test registers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from llmservice_planner import command
from llmservice_planner.command import Command, CommandError, main

Capture = pytest.CaptureFixture[str]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--answer", type=int, default=42, help="the answer")
    parser.add_argument("--question", help="the question")
    parser.add_argument("--unit", default="none", help="its unit (default: none)")
    parser.add_argument("--note", action="append", default=[], help="a note")
    parser.add_argument("--no-doubt", dest="doubt", action="store_false", help="be certain")


def _fail(_: argparse.Namespace) -> int:
    raise CommandError("the answer is wrong: expected 42", status=2)


def _interrupt(_: argparse.Namespace) -> int:
    raise KeyboardInterrupt


ASK = Command(help="ask", add_arguments=_arguments, run=lambda args: args.answer)
FAIL = Command(help="fail", add_arguments=_arguments, run=_fail)
INTERRUPT = Command(help="wait", add_arguments=_arguments, run=_interrupt)
ABSENT = Command(help="absent", add_arguments=_arguments, run=_fail, extra="server", requires=("no_such_module",))
NOT_A_COMMAND = 3


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs commands of this file, as `name="ATTRIBUTE"`, in place of the distribution's."""

    def install(**commands: str) -> None:
        entries = [EntryPoint(name, f"{__name__}:{attribute}", command.GROUP) for name, attribute in commands.items()]
        monkeypatch.setattr(command, "entry_points", lambda group: entries)

    return install


def test_a_commands_result_is_the_exit_status(install: Callable[..., None]) -> None:
    install(ask="ASK")
    assert main(["ask", "--answer", "1"]) == 1


def test_a_user_error_is_printed_without_a_traceback(install: Callable[..., None], capsys: Capture) -> None:
    install(fail="FAIL")
    assert main(["fail"]) == 2
    assert capsys.readouterr().err == "llmservice fail: the answer is wrong: expected 42\n"


def test_an_interrupt_ends_as_shells_expect(install: Callable[..., None]) -> None:
    install(wait="INTERRUPT")
    assert main(["wait"]) == 130


def test_a_command_without_its_libraries_says_what_to_install(install: Callable[..., None], capsys: Capture) -> None:
    install(absent="ABSENT", ask="ASK")
    assert main(["absent"]) == 2
    assert "pip install 'llmservice[server]'" in capsys.readouterr().err


def test_help_lists_only_what_is_installed_and_defaults_that_say_something(
    install: Callable[..., None], capsys: Capture
) -> None:
    install(absent="ABSENT", ask="ASK")
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    assert "ask" in listed
    assert "absent" not in listed
    with pytest.raises(SystemExit):
        main(["ask", "--help"])
    shown = capsys.readouterr().out
    assert "the answer (default: 42)" in shown
    assert shown.count("(default: ") == 2
    assert "its unit (default: none)\n" in shown
    assert "None" not in shown


def test_an_unknown_command_is_a_user_error(install: Callable[..., None], capsys: Capture) -> None:
    install(ask="ASK")
    with pytest.raises(SystemExit) as stopped:
        main(["tell"])
    assert stopped.value.code == 2
    assert "invalid choice: 'tell'" in capsys.readouterr().err


def test_an_entry_point_that_names_something_else_is_a_bug(install: Callable[..., None]) -> None:
    install(odd="NOT_A_COMMAND")
    with pytest.raises(TypeError, match="expected a Command"):
        main(["odd"])


@pytest.mark.parametrize("command", ["up --api-port", "up --gateway-port", "gateway --port", "gateway --metrics-port"])
@pytest.mark.parametrize("text", ["65536", "-1", "http"])
def test_what_is_no_port_is_refused(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), text])
    assert ended.value.code == 2
    assert f"{text!r} is no port, expected 0 to 65535" in capsys.readouterr().err
