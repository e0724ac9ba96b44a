"""A model's chat template: Jinja in a sandbox, with the names that Hugging Face's templates expect.

Not rendered by transformers because that imports torch, which takes 3 s and 300 MB in a process that does not need it.
The tests compare the output of the two.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jinja2 import Template, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template rejects these messages; the message is the template's."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """`variables` are the template's own: they cannot replace those that the server sets."""

    begin_answer: bool = True  # `add_generation_prompt`
    continue_last: bool = False  # end within the last message, so that the model continues it
    variables: Mapping[str, Any] = field(default_factory=dict)


_DEFAULTS = TemplateOptions()
_PROBE = "⟦a message⟧"
_CALL = {"id": "call", "type": "function", "function": {"name": "f", "arguments": {}}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_ASKED = {"role": "user", "content": "a"}
# What comes before a message of each role.
_BEFORE: dict[str, list[dict[str, Any]]] = {
    "system": [],
    "user": [],
    "assistant": [_ASKED],
    "tool": [_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]}],
}
_END = "⟦the end of the last message⟧ "  # no message contains it; the space at its end may be stripped by a template


class ChatTemplate:
    """Compiled once, rendered for each request."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tools_source: str | None = None) -> None:
        """tools_source: the template of requests with tools, where it is another one.

        Raises jinja2.TemplateSyntaxError where a source is not Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._tools_template = self._template if tools_source is None else environment.from_string(tools_source)
        self.source = source + (tools_source or "")
        # The names that it reads without having set them, which a request may set.
        self.variables = meta.find_undeclared_variables(environment.parse(self.source))
        self._special_tokens = dict(special_tokens)
        self._takes_text = self._shows("user", _PROBE) or not self._shows("user", _as_parts([_PROBE]))
        two = _as_parts([_PROBE, _PROBE])
        self._takes_parts, self._takes_parts_beside_tools = (
            {role for role in _BEFORE if self._shows(role, two, tools)} for tools in (None, [_TOOL])
        )
        arguments: dict[str, Any] = {_PROBE: {}}
        calls = [(content, given) for content in ("", None) for given in (arguments, _to_json(arguments))]
        shown = next((call for call in calls if self._shows_call(*call)), calls[0])
        self._takes_none, self._takes_json = shown[0] is None, isinstance(shown[1], str)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions = _DEFAULTS,
    ) -> str:
        """The prompt for the assistant's next turn. Raises ChatTemplateError, never an exception of Jinja.

        The `content` of a message is a text or a list of texts. Where the template reads parts of content, it decides
        what is between them; elsewhere a newline is.
        """
        given = [dict(message) for message in messages]
        takes_parts = self._takes_parts if tools is None else self._takes_parts_beside_tools
        if options.continue_last:
            *before, last = _as_list(given[-1]["content"])
            given[-1]["content"] = [*before, last + _END]
        fixed = {
            "messages": [self._message(message, takes_parts) for message in given],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": options.begin_answer,
            **self._special_tokens,
        }
        if taken := fixed.keys() & options.variables.keys():
            raise ChatTemplateError(f"chat_template_kwargs: {min(taken)} is set by the server: leave it out")
        template = self._template if tools is None else self._tools_template
        try:
            prompt = template.render({"documents": None, **fixed, **options.variables})
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise ChatTemplateError(f"the model's chat template failed: {error}") from error
        return _before_end(prompt) if options.continue_last else prompt

    def _message(self, message: Mapping[str, Any], takes_parts: set[str]) -> dict[str, Any]:
        """As the template reads it. takes_parts: the roles of whose content it reads several parts.

        Those of gpt-oss and LFM2.5 call the reasoning `thinking`, and gpt-oss's accepts no content between it and a
        call; that of Command R7B calls it `tool_plan`.
        """
        given = dict(message)
        texts = _as_list(given["content"])
        if len(texts) > 1 and given["role"] in takes_parts:
            given["content"] = _as_parts(texts)
        elif not self._takes_text:
            given["content"] = _as_parts(["\n".join(texts)])
        else:
            given["content"] = "\n".join(texts)
        if self._takes_none and self._takes_text and given.get("tool_calls"):
            given["content"] = given["content"] or None
        if self._takes_json and "tool_calls" in given:
            given["tool_calls"] = [_with_json(call) for call in given["tool_calls"]]
        hidden = "<|channel|>" in self.source and given.get("content") and given.get("tool_calls")
        if "message.thinking" in self.source and "reasoning_content" in given and not hidden:
            given["thinking"] = given["reasoning_content"]
        if "message.tool_plan" in self.source:
            given["tool_plan"] = given.get("reasoning_content") or ""
        return given

    def _shows(
        self, role: str, content: str | list[dict[str, str]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> bool:
        """Whether a prompt has all text of the `content` in it; templates of some models with images read parts.

        That of Llama 4 reads a text alone where it puts tools before it.
        """
        template = self._template if tools is None else self._tools_template
        prompt = _probe(template, [*_BEFORE[role], {"role": role, "content": content}], self._special_tokens, tools)
        wanted = 1 if isinstance(content, str) else len(content)
        return prompt.count(_PROBE) == wanted and f"'{_PROBE}'" not in prompt and f'"{_PROBE}"' not in prompt

    def _shows_call(self, beside: str | None, arguments: object) -> bool:
        """Whether a prompt has the `arguments` of a call as JSON in it, with the content `beside` the call.

        Templates of DeepSeek read a string; those of V3 and the R1 distillations show calls without a content alone.
        """
        call = {"id": "call", "type": "function", "function": {"name": "f", "arguments": arguments}}
        content = "a" if self._takes_text else _as_parts(["a"])
        turn = {"role": "assistant", "content": beside, "tool_calls": [call]}
        prompt = _probe(self._tools_template, [{"role": "user", "content": content}, turn], self._special_tokens)
        return _PROBE in prompt and f"'{_PROBE}'" not in prompt


def _probe(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The prompt, or nothing where the template fails: it may want other messages."""
    fixed = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
    try:
        return template.render(fixed | dict(special_tokens))
    except Exception:
        return ""


def _as_list(content: str | list[str] | None) -> list[str]:
    return [content] if isinstance(content, str) else content or [""]


def _as_parts(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _with_json(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}


def _before_end(prompt: str) -> str:
    before, mark, after = prompt.rpartition(_END.rstrip())
    if not mark:
        raise ChatTemplateError("the model's chat template omits the last message, which is to be continued")
    return before if after.startswith(" ") else before.rstrip()


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; it is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # name and type are given by Jinja

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
    # Jinja's own filter escapes HTML characters, which a prompt must contain unescaped.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
