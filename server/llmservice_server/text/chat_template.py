"""A model's chat template: Jinja in a sandbox, with the names that Hugging Face's templates expect.

Rendered here and not through transformers because that imports torch: 3 s and 300 MB in a process that needs neither.
The tests hold the two to the same output.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmservice_server.text.tool_format import tool_format


class ChatTemplateError(ValueError):
    """The template does not take these messages, in the template's own words."""


class ChatTemplate:
    """Compiled once, rendered for each request. Raises jinja2.TemplateSyntaxError where the source is no Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self.tool_format = tool_format(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The prompt for the assistant's next turn. Raises ChatTemplateError, never anything of Jinja's."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program: it may divide by zero or index past an end
            raise ChatTemplateError(f"the model's chat template failed: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here they are just words."""

    tags = {"generation"}  # noqa: RUF012  # the name and the type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).astimezone().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not have escaped.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
