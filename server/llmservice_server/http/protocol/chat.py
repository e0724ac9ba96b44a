"""/v1/chat/completions: the body and the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import jiter
import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from llmservice_server.http.error import invalid
from llmservice_server.http.protocol.base import JsonObject, LogprobsCount, Part, TokenCount, without_nulls
from llmservice_server.http.protocol.generation import GenerationRequest, RequestedPromptLogprobs, Usage
from llmservice_server.text.tool_calls import ToolSchema, arguments_schema, required_members
from llmservice_server.types.errors import GrammarError


class TextPart(Part):
    type: Literal["text"]
    text: str


class CalledFunction(Part):
    name: str
    arguments: Annotated[str, Field(description="JSON, as the model wrote it")]


class ToolCall(Part):
    """A call that the assistant has made, repeated in the conversation."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"

    def as_template_input(self) -> dict[str, Any]:
        """Templates expect the arguments as an object; some clients send none as "".

        Arguments that an answer's end has cut off count as far as they go: agents repeat them in each later request.
        Raises ValueError for others.
        """
        written = self.function.arguments or "{}"
        arguments: dict[str, Any] | None
        try:
            arguments = msgspec.json.decode(written, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            arguments = _begun_object(written)
            if arguments is None:
                raise ValueError(f"the arguments of the call {self.id[:64]} are no JSON object: {error}") from error
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


def _begun_object(text: str) -> dict[str, Any] | None:
    """What a JSON object holds whose text ends too early, a begun string included; None: it is wrong otherwise."""
    content = text.encode()
    try:
        jiter.from_json(content, allow_inf_nan=False)
    except ValueError as error:
        if str(error).startswith("EOF") and text.lstrip().startswith("{"):
            begun: dict[str, Any] = jiter.from_json(content, allow_inf_nan=False, partial_mode="trailing-strings")
            return begun
    return None


class Message(Part):
    """`content` may be absent only where an assistant has called tools, or only reasoned."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: Annotated[str | None, Field(description="the assistant's, for templates that repeat it")] = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = []
    tool_call_id: Annotated[str | None, Field(description="of the call that a tool's message answers")] = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        return without_nulls(content) if isinstance(content, dict) else content

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        says_more = self.role == "assistant" and (self.tool_calls or self.reasoning_content)
        if self.content is None and not says_more:
            raise PydanticCustomError("missing_field", "{field} is missing", {"field": "content"})
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are the assistant's, not the {self.role}'s")
        if self.reasoning_content is not None and self.role != "assistant":
            raise ValueError(f"reasoning_content is the assistant's, not the {self.role}'s")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to messages of the role tool, which need it")
        return self

    @property
    def text(self) -> str:
        return "\n".join(self._texts)

    @property
    def _texts(self) -> list[str]:
        return [part.text for part in self.content] if isinstance(self.content, list) else [self.content or ""]

    def as_template_input(self) -> dict[str, Any]:
        """`developer` is OpenAI's newer name for `system`, and the one that templates know. Raises ValueError."""
        content = self._texts if len(self._texts) > 1 else self.text
        given: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            given["name"] = self.name
        if self.reasoning_content is not None:
            given["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            given["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        if self.tool_call_id is not None:
            given["tool_call_id"] = self.tool_call_id
        return given


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


MAX_TOOLS = 128

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Part):
    """Calls conform to `parameters`: with `strict` to all of it, else as far as a grammar can tell."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[
        JsonObject | None, Field(description="a JSON schema of an object; absent: the function takes no arguments")
    ] = None
    strict: bool | None = None

    def as_schema(self) -> ToolSchema:
        return ToolSchema(self.name, self._arguments, bool(self.strict))

    @property
    def _arguments(self) -> dict[str, Any]:
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return arguments_schema({key: each for key, each in self.parameters.items() if each is not None})


class Tool(Part):
    type: Literal["function"]
    function: Function


class ChosenFunction(Part):
    name: FunctionName


class NamedTool(Part):
    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Part):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


class ToolsAllowed(Part):
    """The prompt has all tools, and some of them may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | ToolsAllowed, Field(discriminator="type")]


def callable_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[ToolSchema]:
    """What the model may call under `choice`. Raises ApiError (400) where tools and choice contradict each other."""
    names = [tool.function.name for tool in tools]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise invalid(f"tools: {min(repeated)} is there more than once", param="tools")
    schemas = {tool.function.name: tool.function.as_schema() for tool in tools}
    for index, schema in enumerate(schemas.values()):
        try:
            _ = schema.properties, required_members(schema.arguments)
        except GrammarError as error:
            raise invalid(f"tools[{index}].function.parameters.{error}", param="tools") from error
        if schema.arguments["type"] != "object":
            raise invalid(f"tools[{index}].function.parameters: expected the schema of an object", param="tools")
    if choice == "none":
        return []
    if not tools and choice != "auto":
        raise invalid("tool_choice is only allowed beside tools", param="tool_choice")
    if isinstance(choice, str):
        return list(schemas.values())
    chosen = [choice] if isinstance(choice, NamedTool) else choice.allowed_tools.tools
    for name in (each.function.name for each in chosen):
        if name not in schemas:
            raise invalid(f"tool_choice names {name}, which is not among the tools", "tool_choice")
    return [schemas[name] for name in dict.fromkeys(each.function.name for each in chosen)]


def as_template_input(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As chat templates expect them, without the fields that the client left out."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
RequestedEffort = Annotated[
    ReasoningEffort | None,
    Field(description="for chat templates that read it; none also turns off enable_thinking"),
]


class ChatRequest(GenerationRequest):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}]
        }
    )
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.refused,
        "audio": (),
        "chat_template": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "web_search_options": (),
    }

    messages: Messages
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: LogprobsCount = 0
    tools: Tools = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    add_generation_prompt: Annotated[
        bool | None, Field(description="whether the assistant's turn is begun (default: unless its last is continued)")
    ] = None
    continue_final_message: Annotated[
        bool, Field(description="the model continues the last message, the assistant's, instead of answering it")
    ] = False
    chat_template_kwargs: Annotated[
        JsonObject, Field(description="the template's own variables, such as enable_thinking")
    ] = {}
    reasoning_effort: RequestedEffort = None
    verbosity: str | None = None  # without effect on the answer, and therefore ignored

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.token_limit:
            raise invalid(
                "max_tokens and max_completion_tokens contradict each other: give one of them",
                param="max_completion_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
        _ = self.callable_tools  # raises
        return self

    @cached_property
    def callable_tools(self) -> list[ToolSchema]:
        """What the model may call. Raises ApiError where tools and choice contradict each other."""
        return callable_tools(self.tools, self.tool_choice)

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        return (
            choice == "required"
            or isinstance(choice, NamedTool)
            or (isinstance(choice, ToolsAllowed) and choice.allowed_tools.mode == "required")
        )

    @property
    def is_structured(self) -> bool:
        return super().is_structured or bool(self.callable_tools)

    @property
    def continued(self) -> str | None:
        """The text that the answer continues, the assistant's last message; None: it is a new one."""
        return self.messages[-1].text if self.continue_final_message else None

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class AnsweredFunction(BaseModel):
    name: str
    arguments: Annotated[str, Field(description="JSON, as the model wrote it")]


class AnsweredToolCall(BaseModel):
    id: str
    function: AnsweredFunction
    type: Literal["function"] = "function"


class AnsweredMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: Annotated[
        str | None,
        Field(description="absent where there is none", exclude_if=lambda reasoning: reasoning is None),
    ] = None
    refusal: None = None
    tool_calls: Annotated[
        list[AnsweredToolCall],
        Field(description="absent where there are none", exclude_if=lambda calls: not calls),
    ] = []


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: Annotated[list[TokenLogprob], Field(description="one for each token")]
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AnsweredMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: Annotated[int, Field(description="seconds since 1970")]
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: RequestedPromptLogprobs = None
