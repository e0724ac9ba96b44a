"""The tools that a client offers, and which of them the model may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from llmservice_server.http.error import invalid
from llmservice_server.http.protocol.base import JsonObject, Part
from llmservice_server.text.tool_calls import ToolSchema

MAX_TOOLS = 128

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Part):
    """Every call conforms to `parameters`, so `strict` changes nothing."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[
        JsonObject | None, Field(description="a JSON schema of an object; absent: the function takes no arguments")
    ] = None
    strict: bool | None = None

    @property
    def arguments_schema(self) -> dict[str, Any]:
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(Part):
    type: Literal["function"]
    function: Function


class ChosenFunction(Part):
    name: FunctionName


class NamedTool(Part):
    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def callable_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[ToolSchema]:
    """What the model may call under `choice`. Raises ApiError (400) where tools and choice contradict each other."""
    names = [tool.function.name for tool in tools]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise invalid(f"tools: {min(repeated)} is there more than once", param="tools")
    for index, tool in enumerate(tools):
        if tool.function.arguments_schema["type"] != "object":
            raise invalid(f"tools[{index}].function.parameters: expected the schema of an object", param="tools")
    if choice == "none":
        return []
    if not tools and choice != "auto":
        raise invalid("tool_choice is only allowed beside tools", param="tool_choice")
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise invalid(f"tool_choice names {choice.function.name}, which is not among the tools", "tool_choice")
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    return [ToolSchema(tool.function.name, tool.function.arguments_schema) for tool in tools]


def as_template_input(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As chat templates expect them, without the fields that the client left out."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]
