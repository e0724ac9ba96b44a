"""Bounds what of a grammar one text must match at once.

llguidance lists all combinations of the parts of the patterns that are intersected, within none of its limits: thirty
short ones take more memory than any machine has. A pattern's parts are what a text may continue with, each of which is
a character or a class in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote

from llmservice_server.types.errors import GrammarError

_MOST_COMBINATIONS = 1e7
_INTERSECTION = re.compile(r"&(?!\s*~\s*[\"/])")  # the parts of what a text must not match exclude each other
_SCHEMA = re.compile(r"%json\s*(?=\{)")
_PART = re.compile(r"\\.|\[[^]]*]|.", re.DOTALL)
_NUM_FORMAT_PARTS = 20
_NOT_APPLIED = {"$defs", "definitions", "enum", "const", "default", "examples"}


def check_rules(rules: str) -> None:
    """Raises GrammarError for rules in Lark that intersect too much; those of a server's own formats do not."""
    num_parts = 2 ** min(16, len(_INTERSECTION.findall(rules)))  # an intersection may repeat rules that have others
    _check(num_parts * math.log(max(2, len(rules) / num_parts)))
    for found in _SCHEMA.finditer(rules):
        schema: dict[str, Any] = {}
        with suppress(ValueError, RecursionError):  # llguidance says what is wrong
            schema, _ = json.JSONDecoder().raw_decode(rules, found.end())
        check_schema(schema)


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises GrammarError for a JSON schema under which a text must match too many patterns at once."""
    try:
        _check(max(_Combinations(schema).of(schema)))
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None


def _check(logarithm: float) -> None:
    if logarithm > math.log(_MOST_COMBINATIONS):
        raise GrammarError("one text must match too many patterns at once: join them into one, or leave some out")


class _Bound(NamedTuple):
    """Logarithms of bounds on the combinations of parts that a text must match."""

    text: float = 0.0  # that one text within a value must match
    compared: float = 0.0  # where two options of a oneOf are compared, whatever holds for both beside them included


def _either(bounds: Iterable[_Bound]) -> _Bound:
    texts, compared = zip(_Bound(), *bounds, strict=True)
    return _Bound(max(texts), max(compared))


def _together(bounds: Sequence[_Bound]) -> _Bound:
    text = sum(each.text for each in bounds)
    compared = (each.compared + 2 * (text - each.text) for each in bounds if each.compared)
    return _Bound(text, max(compared, default=0.0))


class _Combinations:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, _Bound] = {}

    def of(self, part: Any) -> _Bound:
        if isinstance(part, list):
            return _either(map(self.of, part))
        if not isinstance(part, Mapping):
            return _Bound()
        if id(part) not in self._known:
            self._known[id(part)] = _Bound()  # while it is computed, which may lead back here
            applied = [self._of_keyword(*item) for item in part.items() if item[0] not in _NOT_APPLIED]
            self._known[id(part)] = _together(applied)
        return self._known[id(part)]

    def _of_keyword(self, keyword: str, value: Any) -> _Bound:
        if isinstance(value, str):
            return self._of_reference(value) if keyword == "$ref" else _Bound(_of_text(keyword, value))
        if isinstance(value, list) and keyword in ("allOf", "oneOf"):
            options = list(map(self.of, value))
            if keyword == "allOf":
                return _together(options)
            two = sum(sorted(each.text for each in options)[-2:])  # an option within an option is one of all
            return _either([*options, _Bound(compared=two)])
        if isinstance(value, dict) and keyword in ("properties", "patternProperties"):
            names = value if keyword == "patternProperties" else ()  # which are compared two by two
            compared = sorted(_of_text("pattern", name) for name in names)[-2:]
            return _together([self.of(list(value.values())), _Bound(sum(compared))])
        return self.of(value)

    def _of_reference(self, reference: str) -> _Bound:
        if reference == "#" or reference.startswith("#/"):
            with suppress(LookupError, TypeError, ValueError):
                target: Any = self._root
                for name in unquote(reference).split("/")[1:]:
                    key = name.replace("~1", "/").replace("~0", "~")
                    target = target[int(key)] if isinstance(target, list) else target[key]
                return self.of(target)
        return _Bound(_of_all(self._root))  # a name, which any part of the schema may have


def _of_all(part: Any) -> float:
    if isinstance(part, Mapping):
        return sum(_of_text(*item) if isinstance(item[1], str) else _of_all(item[1]) for item in part.items())
    return sum(map(_of_all, part)) if isinstance(part, list) else 0.0


def _of_text(keyword: str, value: str) -> float:
    if keyword == "pattern":
        parts = value if "#" in value else set(_PART.findall(value))  # which may begin a comment
        return math.log(1 + len(parts))  # any text before it is one more, unless it is anchored
    return math.log(_NUM_FORMAT_PARTS) if keyword == "format" else 0.0
