"""Each grammar is compiled once, and a slow one delays no other."""

from pathlib import Path

import pytest

from llmservice_server.sampling.grammar import TOO_COMPLEX, GrammarCompiler, lark_grammar, regex_grammar
from llmservice_server.tiny.model import TinyModelSpec
from llmservice_server.types.errors import GrammarError

pytestmark = pytest.mark.slow

SLOW = [regex_grammar(f"(a{{{count}}}){{2000}}") for count in range(2000, 2003)]


@pytest.fixture
def compiler(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model, TinyModelSpec().vocab_size, frozenset({1}))


def test_known_grammar_is_there_at_once_however_many_slow_ones_are_worked_out(compiler: GrammarCompiler) -> None:
    known = compiler.compile(regex_grammar("(yes|no)"))
    known.result(timeout=60)
    slow = [compiler.compile(grammar) for grammar in SLOW]
    assert compiler.compile(regex_grammar("(yes|no)")) is known
    assert not all(future.done() for future in slow)
    assert {str(future.result(timeout=60)) for future in slow} == {TOO_COMPLEX}


def test_refusal_is_remembered_without_what_was_worked_out_for_it(compiler: GrammarCompiler) -> None:
    refusal = compiler.compile(SLOW[0])
    assert compiler.compile(SLOW[0]) is refusal
    error = refusal.result(timeout=60)
    assert isinstance(error, GrammarError)
    assert (error.__traceback__, error.__context__, error.__cause__) == (None, None, None)


def test_only_the_latest_grammars_are_remembered(compiler: GrammarCompiler) -> None:
    first = compiler.compile(regex_grammar("a"))
    for number in range(130):
        compiler.compile(regex_grammar(f"b{number}"))
    assert compiler.compile(regex_grammar("b129")).result(timeout=60)
    assert compiler.compile(regex_grammar("a")) is not first


def test_fewer_are_remembered_where_they_are_long(compiler: GrammarCompiler) -> None:
    first = compiler.compile(regex_grammar("a"))
    comment = "x" * 2**21
    long = [lark_grammar(f'// {number} {comment}\nstart: "a"') for number in range(4)]
    outcomes = [compiler.compile(grammar) for grammar in long]
    assert compiler.compile(long[3]) is outcomes[3]
    assert compiler.compile(long[1]) is outcomes[1]
    assert compiler.compile(regex_grammar("a")) is not first
    assert compiler.compile(lark_grammar(f"// {comment * 5}\nstart: nowhere")).exception(timeout=60) is None
