"""The tools that a client offers, and which of them it lets the model call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from llmservice_server.api.error import invalid
from llmservice_server.text.tool_format import ToolSchema

MAX_TOOLS = 128

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Every call keeps to `parameters`, so `strict` changes nothing."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of an object; None: the function takes nothing
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: FunctionName


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def callable_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[ToolSchema]:
    """What the model may call under `choice`. Raises ApiError (400) where tools and choice contradict each other."""
    names = [tool.function.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise invalid(f"tools: {min(twice)} is there more than once", param="tools")
    for index, tool in enumerate(tools):
        if tool.function.schema["type"] != "object":
            raise invalid(f"tools[{index}].function.parameters: expected the schema of an object", param="tools")
    if choice == "none":
        return []
    if not tools and choice != "auto":
        raise invalid("tool_choice is only allowed beside tools", param="tool_choice")
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise invalid(f"tool_choice names {choice.function.name}, which is not among the tools", "tool_choice")
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    return [ToolSchema(tool.function.name, tool.function.schema) for tool in tools]


def as_template_input(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As chat templates know them, without what the client left out."""
    given: list[dict[str, Any]] = msgspec.to_builtins(tools)
    return given
