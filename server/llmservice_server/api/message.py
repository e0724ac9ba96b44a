"""A chat's messages: what clients send, and what a chat template is given."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that the assistant has made, told again in the conversation."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"

    def as_template_input(self) -> dict[str, Any]:
        """Templates want the arguments as an object; some clients send none as "". Raises ValueError for others."""
        try:
            arguments = msgspec.json.decode(self.function.arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"the arguments of the call {self.id} are no JSON object: {error}") from error
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None  # only an assistant that has called tools may have said nothing
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None  # of the call that a tool's message answers

    def __post_init__(self) -> None:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("Object missing required field `content`")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are the assistant's, not the {self.role}'s")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to messages of the role tool, which need it")

    def as_template_input(self) -> dict[str, Any]:
        """`developer` is OpenAI's newer word for `system`, and the one that templates know. Raises ValueError."""
        parts = self.content or ""
        given: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": parts if isinstance(parts, str) else "".join(part.text for part in parts),
        }
        if self.name is not None:
            given["name"] = self.name
        if self.tool_calls:
            given["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        if self.tool_call_id is not None:
            given["tool_call_id"] = self.tool_call_id
        return given
