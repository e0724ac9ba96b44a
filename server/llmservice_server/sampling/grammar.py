"""Answers that conform to a grammar, in llguidance's JSON: compiling it, and following an answer through it.

The library is loaded with the first request that has a grammar, and so is its tokenizer, which takes it up to a second.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from llmservice_server.sampling.intersections import check_rules, check_schema
from llmservice_server.types.errors import GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_REMEMBERED_GRAMMARS = 128  # clients send the same few again and again
_REMEMBERED_LENGTH = 2**23  # of their text together; a matcher takes some 40 bytes for each character of it
_THREADS = 4  # a grammar that takes seconds delays no other; the library releases the interpreter's lock
_WHITE_SPACE = r"[ \t\n]{1,24}"
WHITE_SPACE = f"(/{_WHITE_SPACE}/)?"
"""In a rule: white space between the parts of JSON, or none."""
_MAX_MASK_S = 0.025  # that a mask may take: all of a step's sequences wait for it, and a sensible one takes under 1 ms
TOO_COMPLEX = (
    "the grammar is too complex to follow within the limits of a step: use a smaller schema, fewer tools, or a pattern "
    "that counts less far"
)


def json_grammar(schema: dict[str, Any]) -> str:
    """The grammar of JSON that is valid under a schema. Raises GrammarError where that takes too much."""
    return json.dumps({"grammars": [{"json_schema": _with_options(schema, strict=True)}]})


def lark_grammar(rules: str) -> str:
    """A grammar in llguidance's dialect of Lark; `%json` in it is followed by a schema."""
    return json.dumps({"grammars": [{"lark_grammar": "%llguidance {}\n" + rules}]})


def clients_grammar(rules: str) -> str:
    """Likewise of rules that a client wrote. Raises GrammarError where they take too much."""
    check_rules(rules)
    return lark_grammar(rules)


def regex_grammar(pattern: str) -> str:
    """The grammar of texts that match a regular expression whole: in Rust's syntax, without looking around."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


def choice_grammar(texts: Sequence[str]) -> str:
    """The grammar of one of some texts, none of them empty."""
    return lark_grammar("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


def behind(grammar: str, rules: str) -> str:
    """The grammar of `rules` in Lark, which refer to `grammar` as `@answer`."""
    outer, [inner] = json.loads(lark_grammar(rules))["grammars"], json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [*outer, inner | {"name": "answer"}]})


class LarkRules:
    """Rules of a grammar for llguidance in which markers that are tokens appear as these tokens only."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """`token_ids`: the markers that are tokens of the model's vocabulary."""
        self._token_ids = token_ids
        self._rules: list[str] = []
        self._names = itertools.count()

    def new_name(self) -> str:
        """Of a rule that is added later; the same in every grammar that is made the same way, as these are cached."""
        return f"rule_{next(self._names)}"

    def add(self, rule: str) -> None:
        self._rules.append(rule)

    def text(self, start: str) -> str:
        """All rules, of which `start` is the right side of the first."""
        return "\n".join([f"start: {start}", *self._rules])

    def literal(self, text: str) -> str:
        if not self._token_ids:
            return json.dumps(text)
        parts = re.split("(" + "|".join(map(re.escape, self._token_ids)) + ")", text)
        ids = self._token_ids
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)

    def text_until(self, marker: str, *, pattern: str = "(.|\\n)*", unless: str = "") -> tuple[str, str]:
        """Text without `marker`, and text with `marker` behind it. It matches `pattern` and not `unless`."""
        name = f"TEXT_{len(self._rules)}"
        rule = f"{name}: /{pattern}/" + (f" & ~/{unless}/" if unless else "")
        if marker in self._token_ids:  # other tokens that spell it would be parsed as the marker as well
            self.add(f"{rule} & ~/(.|\\n)*{escaped(marker)}(.|\\n)*/")
            return name, f"{name} {self.literal(marker)}"
        self.add(rule)
        self.add(f"until_{name.lower()}[lazy]: {name} {json.dumps(marker)}")
        return name, f"until_{name.lower()}"


def escaped(text: str) -> str:
    """A pattern that matches `text`, for Lark."""
    return re.escape(text).replace("/", "\\/")


def json_rule(schema: Mapping[str, Any], *, strict: bool) -> str:
    """The right side of a rule for JSON that is valid under a schema; not `strict`: as far as a grammar can tell."""
    return f"%json {json.dumps(_with_options(schema, strict=strict))}"


def _with_options(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """White space is bounded, because a model may otherwise fill a whole answer with spaces. Raises GrammarError."""
    check_schema(schema)
    options = {"whitespace_flexible": True, "whitespace_pattern": _WHITE_SPACE}
    return {**schema, "x-guidance": options if strict else {**options, "lenient": True, "coerce_one_of": True}}


def check_grammar(grammar: str) -> None:
    """Raises GrammarError where no answer can be held to it: a broken schema, or a keyword that is not supported."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        reason = " ".join(messages[0].split())  # which quotes what it is about, however long that is
        raise GrammarError(reason if len(reason) <= 400 else f"{reason[:200]} … {reason[-200:]}")


class Grammar:
    """The state of one answer in its grammar. It advances with the tokens, so a preemption does not affect it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def take(self, token_id: int) -> bool:
        """Move on by a token that the mask allowed; True where the answer is complete and nothing can follow."""
        return self.matcher.consume_token(token_id) and self.matcher.is_stopped()

    @property
    def problem(self) -> str | None:
        """Why this answer cannot be continued, in one line without the answer's words; None: it can."""
        return TOO_COMPLEX if self.matcher.is_error() else None


class CompiledGrammar:
    """A matcher at the grammar's beginning, of which each answer follows a copy."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def start(self) -> Grammar:
        return Grammar(self.matcher.deep_copy())


class GrammarCompiler:
    """Compiles grammars into matchers. `vocab_size` is the model's, padding included.

    Outcomes are cached, refusals as well: a grammar that is requested again gets its outcome at once, as do
    all requests for it while it is compiled.
    """

    def __init__(self, model: Path, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(_THREADS, "grammar")
        self._tokenizer_lock = Lock()
        self._tokenizers: dict[Sequence[int], LLTokenizer] = {}  # by the tokens that end answers: one, as a rule
        self._outcomes: OrderedDict[tuple[str, Sequence[int]], Future[CompiledGrammar | GrammarError]] = OrderedDict()
        self._length = 0  # of the grammars that are remembered

    def compile(self, grammar: str, end_token_ids: Sequence[int]) -> Future[CompiledGrammar | GrammarError]:
        """The grammar, or the error that says what is wrong with it. Answers that conform to it end with one of
        `end_token_ids`."""
        key = grammar, tuple(end_token_ids)
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome = self._outcomes[key] = self._threads.submit(self._outcome, *key)
            self._length += len(grammar)
        self._outcomes.move_to_end(key)
        while len(self._outcomes) > _REMEMBERED_GRAMMARS or self._length > _REMEMBERED_LENGTH:
            (oldest, _), _ = self._outcomes.popitem(last=False)
            self._length -= len(oldest)
        return outcome

    def _outcome(self, grammar: str, end_token_ids: Sequence[int]) -> CompiledGrammar | GrammarError:
        try:
            return CompiledGrammar(self._compile(grammar, end_token_ids))
        except GrammarError as error:
            return error.with_traceback(None)  # whose frames would keep the matcher, of half a gigabyte at worst

    def _compile(self, grammar: str, end_token_ids: Sequence[int]) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer(end_token_ids), grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().partition("\n")[0])
        _compute_first_mask(matcher)
        return matcher

    def _tokenizer(self, end_token_ids: Sequence[int]) -> LLTokenizer:
        with self._tokenizer_lock:
            if end_token_ids not in self._tokenizers:
                self._tokenizers[end_token_ids] = self._made_tokenizer(end_token_ids)
            return self._tokenizers[end_token_ids]

    def _made_tokenizer(self, end_token_ids: Sequence[int]) -> LLTokenizer:
        from llguidance import LLTokenizer

        text = (self._model / "tokenizer.json").read_text(encoding="utf-8")
        ends = [one for one in end_token_ids if one < self._vocab_size]  # a tokenizer may have more tokens
        try:
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends or None)
        except ValueError as error:
            raise GrammarError(f"grammars cannot be used with this model's tokenizer: {error}") from None


def _compute_first_mask(matcher: LLMatcher) -> None:
    """The first mask costs the most; copies of the matcher share the states that were computed for it.

    Raises GrammarError where even later masks take so long that they would delay all other sequences.
    """
    matcher.compute_bitmask()
    taken_s = []
    for _ in range(3):
        begun_s = time.perf_counter()
        matcher.compute_bitmask()
        taken_s.append(time.perf_counter() - begun_s)
    if matcher.is_error() or min(taken_s) > _MAX_MASK_S:
        raise GrammarError(TOO_COMPLEX)
