"""Write the chart's values.schema.json and README table from the comments in its values.yaml.

    python charts/values_docs.py

The comment right above a value says what it is for. A line `@schema {…}` in it, a YAML mapping, adds JSON Schema
keywords to what the default says already; a value with `$ref` there is not looked into. Objects take no other fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "llmservice"
BEGIN, END = "<!-- values: begin (made by `make chart` from values.yaml) -->", "<!-- values: end -->"
MARK = "@schema "

Schema = dict[str, Any]

STRING_MAP: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
DEFINITIONS: dict[str, Schema] = {
    "strings": {"type": "array", "items": {"type": "string"}},
    "stringMap": STRING_MAP,
    "stringLists": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}},
    "ownLabels": STRING_MAP | {"propertyNames": {"not": {"pattern": r"^(app\.kubernetes\.io|helm\.sh)/"}}},
    "dnsLabel": {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    "repository": {"type": "string", "pattern": "^[a-z0-9]+([._/-][a-z0-9]+)*$"},
    "object": {"type": "object"},
    "objects": {"type": "array", "items": {"type": "object"}},
    "env": {
        "type": "array",
        "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "minLength": 1}}},
    },
    "resources": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"requests": {"type": "object"}, "limits": {"type": "object"}, "claims": {"type": "array"}},
    },
}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the chart with what its comment says."""

    path: tuple[str, ...]
    default: Any
    meaning: str
    keywords: Schema
    children: tuple[Value, ...] = ()

    @property
    def name(self) -> str:
        return ".".join(self.path)

    def schema(self) -> Schema:
        said = {"description": self.meaning} if self.meaning else {}
        if self.children:
            return said | _object(self.children)
        if "$ref" in self.keywords:  # draft 7 ignores what stands beside a $ref
            return said | {"allOf": [self.keywords]}
        if self.default in ({}, []) and not self.keywords:
            raise ValueError(f"{self.name} is empty by default: say by `{MARK.strip()}` what it may hold")
        typed = {} if "enum" in self.keywords else {"type": _TYPES[type(self.default)]}
        return said | typed | self.keywords

    def leaves(self) -> Iterator[Value]:
        """The values that can be set, in the order of the file."""
        for child in self.children:
            yield from child.leaves()
        if not self.children:
            yield self


def parse(text: str) -> tuple[Value, ...]:
    """The values of a values.yaml, with the comments above them."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise TypeError("values.yaml must be a mapping")
    return _values(root, text.splitlines(), ())


def _values(node: yaml.MappingNode, lines: list[str], parents: tuple[str, ...]) -> tuple[Value, ...]:
    found = []
    for key, value in node.value:
        meaning, keywords = _comment(lines, key.start_mark.line, key.start_mark.column)
        path = (*parents, key.value)
        looked_into = isinstance(value, yaml.MappingNode) and value.value and "$ref" not in keywords
        children = _values(value, lines, path) if looked_into else ()
        found.append(Value(path, _plain(value), meaning, keywords, children))
    return tuple(found)


def _plain(node: yaml.Node) -> Any:
    return yaml.SafeLoader("").construct_document(node)


def _comment(lines: list[str], line: int, column: int) -> tuple[str, Schema]:
    """The comment that ends right above a line at the same indentation: its text, and its schema keywords."""
    start = line
    while start > 0 and lines[start - 1].startswith(" " * column + "#"):
        start -= 1
    said: list[str] = []
    keywords: Schema = {}
    for text in (each.strip().lstrip("#").strip() for each in lines[start:line]):
        if text.startswith(MARK):
            keywords |= yaml.safe_load(text.removeprefix(MARK))
        else:
            said.append(text)
    return " ".join(said), keywords


def _object(values: tuple[Value, ...]) -> Schema:
    properties = {value.path[-1]: value.schema() for value in values}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def schema_json(values: tuple[Value, ...]) -> str:
    """values.schema.json; `global` is what a parent chart would set."""
    schema = _object(values)
    schema["properties"]["global"] = {"type": "object"}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the llmservice chart"}
    return json.dumps(head | {"definitions": DEFINITIONS} | schema, indent=2) + "\n"


def readme(text: str, values: tuple[Value, ...]) -> str:
    """README.md with its table of values made anew; raises ValueError where it has no place for one."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md needs a line {BEGIN!r} and a line {END!r}")
    rows = [_row(group, leaf) for group in values for leaf in group.leaves()]
    table = "\n".join(["| value | default | what it is for |", "|---|---|---|", *rows])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _row(group: Value, leaf: Value) -> str:
    """A switch called `enabled` is explained by its group's comment."""
    meaning = leaf.meaning or (group.meaning if leaf.path[-1] == "enabled" else "")
    cells = (f"`{leaf.name}`", f"`{json.dumps(leaf.default)}`", meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def outputs() -> dict[Path, str]:
    """What the generated files should hold now."""
    values = parse((CHART / "values.yaml").read_text(encoding="utf-8"))
    current = (CHART / "README.md").read_text(encoding="utf-8")
    return {CHART / "values.schema.json": schema_json(values), CHART / "README.md": readme(current, values)}


def main() -> None:
    for path, text in outputs().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    main()
