"""Each grammar is compiled once, and a slow one delays no other."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from llmservice_server.sampling.grammar import (
    TOO_COMPLEX,
    CompiledGrammar,
    GrammarCompiler,
    lark_grammar,
    regex_grammar,
)
from llmservice_server.tiny.model import TinyModelSpec
from llmservice_server.types.errors import GrammarError

pytestmark = pytest.mark.slow

Compiled = Callable[[str], Future[CompiledGrammar | GrammarError]]
SLOW = [regex_grammar(f"(a{{{count}}}){{2000}}") for count in range(2000, 2003)]


@pytest.fixture
def compiled(tiny_model: Path) -> Compiled:
    return partial(GrammarCompiler(tiny_model, TinyModelSpec().vocab_size).compile, end_token_ids=(1,))


def test_known_grammar_is_there_at_once_however_many_slow_ones_are_worked_out(compiled: Compiled) -> None:
    known = compiled(regex_grammar("(yes|no)"))
    known.result(timeout=60)
    slow = [compiled(grammar) for grammar in SLOW]
    assert compiled(regex_grammar("(yes|no)")) is known
    assert not all(future.done() for future in slow)
    assert {str(future.result(timeout=60)) for future in slow} == {TOO_COMPLEX}


def test_refusal_is_remembered_without_what_was_worked_out_for_it(compiled: Compiled) -> None:
    refusal = compiled(SLOW[0])
    assert compiled(SLOW[0]) is refusal
    error = refusal.result(timeout=60)
    assert isinstance(error, GrammarError)
    assert (error.__traceback__, error.__context__, error.__cause__) == (None, None, None)


def test_only_the_latest_grammars_are_remembered(compiled: Compiled) -> None:
    first = compiled(regex_grammar("a"))
    for number in range(130):
        compiled(regex_grammar(f"b{number}"))
    assert compiled(regex_grammar("b129")).result(timeout=60)
    assert compiled(regex_grammar("a")) is not first


def test_fewer_are_remembered_where_they_are_long(compiled: Compiled) -> None:
    first = compiled(regex_grammar("a"))
    comment = "x" * 2**21
    long = [lark_grammar(f'// {number} {comment}\nstart: "a"') for number in range(4)]
    outcomes = [compiled(grammar) for grammar in long]
    assert compiled(long[3]) is outcomes[3]
    assert compiled(long[1]) is outcomes[1]
    assert compiled(regex_grammar("a")) is not first
    assert compiled(lark_grammar(f"// {comment * 5}\nstart: nowhere")).exception(timeout=60) is None


def test_an_end_that_the_model_has_no_token_for_is_left_out(tiny_model: Path) -> None:
    vocab_size = TinyModelSpec().vocab_size
    outcome = GrammarCompiler(tiny_model, vocab_size).compile(regex_grammar("a"), (1, vocab_size))
    assert isinstance(outcome.result(timeout=60), CompiledGrammar)
