"""/v1/responses: the body, which is converted to that of a chat, and the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from llmservice_server.http.error import ApiError, echo, invalid
from llmservice_server.http.protocol.base import JsonObject, LogprobsCount, Part, TokenCount, without_nulls
from llmservice_server.http.protocol.chat import (
    MAX_TOOLS,
    AllowedTools,
    CalledFunction,
    ChatRequest,
    ChosenFunction,
    Function,
    FunctionName,
    Message,
    NamedTool,
    RequestedEffort,
    TextPart,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolChoice,
    ToolsAllowed,
)
from llmservice_server.http.protocol.generation import GenerationRequest, JsonSchema, ResponseFormat

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # reasoning is not encrypted: it is there anyway


class _Item(Part):
    """A part of the conversation, as a client writes it or as an answer had it."""

    id: str | None = None
    status: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        return without_nulls(content) if isinstance(content, dict) else content


class InputText(Part):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None  # both as answers have them
    logprobs: list[Any] | None = None


_Texts = str | Annotated[list[InputText], Field(fail_fast=True)]


class InputMessage(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Texts
    phase: str | None = None  # commentary or final_answer, as OpenAI's answers have it


class FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Annotated[str, Field(description="JSON, as the model wrote it")]


class FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: _Texts


class ReasoningText(Part):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(_Item):
    """The assistant's, for templates that repeat it: its content, else its summary."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] = []
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] = []
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary)


def _type_of(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else str(kind)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _type_of,
        custom_error_type="item_type",
        custom_error_message="Expected an item of the type message, function_call, function_call_output or reasoning "
        "(answers are not kept, so that no item can be referred to: have the client set store to false)",
    ),
]


class FunctionTool(Part):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def as_chat(self) -> Tool:
        given = self.model_dump(include=self.model_fields_set - {"type"})
        return Tool(type="function", function=Function(**given))


class NamespaceTool(Part):
    """Functions under a common name, as Codex sends those of MCP servers. Templates know no namespaces."""

    type: Literal["namespace"]
    name: FunctionName
    description: Annotated[str | None, Field(description="stands before that of the first function")] = None
    tools: Annotated[list[FunctionTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]

    def as_chat(self) -> list[Tool]:
        tools = [tool.as_chat() for tool in self.tools]
        for tool in tools:  # not validated again: OpenAI bounds the names alone
            tool.function.name = joined_name(self.name, tool.function.name)
        if self.description is not None:
            first = tools[0].function
            first.description = "\n\n".join(filter(None, (self.description, first.description)))
        return tools


def joined_name(namespace: str | None, name: str) -> str:
    """As the model sees the function, and as vLLM names it."""
    return name if namespace is None else f"{namespace}__{name}"


class WebSearch(Part):
    """OpenAI's own search, which Codex offers with every request. The model does not see it.

    It is reported as an ignored parameter.
    """

    type: Literal["web_search"]

    @model_validator(mode="before")
    @classmethod
    def _as_unknown(cls, content: Any) -> Any:
        return {"type": "web_search", "web_search": True} if isinstance(content, dict) else content


class NamedFunction(Part):
    type: Literal["function"]
    name: FunctionName

    def as_chat(self) -> NamedTool:
        return NamedTool(type="function", function=ChosenFunction(name=self.name))


class AllowedFunctions(Part):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, fail_fast=True)]

    def as_chat(self) -> ToolsAllowed:
        allowed = AllowedTools(mode=self.mode, tools=[tool.as_chat() for tool in self.tools])
        return ToolsAllowed(type="allowed_tools", allowed_tools=allowed)


FunctionChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedFunction | AllowedFunctions, Field(discriminator="type")]
)


class TextFormat(Part):
    """Free text, any JSON object, or JSON of a schema, which is enforced with and without `strict`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema belongs to the type json_schema, which needs it")
        return self

    def as_chat(self) -> ResponseFormat:
        schema = None if self.schema_ is None else JsonSchema.model_validate({"name": "answer", "schema": self.schema_})
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(Part):
    format: TextFormat | None = None
    verbosity: str | None = None  # without effect on the answer


class ReasoningOptions(Part):
    effort: RequestedEffort = None
    summary: Annotated[str | None, Field(description="ignored: the reasoning itself is in the answer")] = None
    generate_summary: str | None = None


_OWN_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
}


@contextmanager
def own_names() -> Iterator[None]:
    """Errors about the chat name the fields of the response."""
    try:
        yield
    except ApiError as error:
        error.param = _OWN_NAMES.get(error.param or "", error.param)
        error.message = error.message.replace("].function.parameters", "].parameters")
        for name in ("max_tokens", "response_format"):
            error.message = re.sub(rf"\b{name}\b", _OWN_NAMES[name], error.message)
        raise


class ResponsesRequest(GenerationRequest):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "llama", "input": "Hello", "max_output_tokens": 32}]}
    )
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.refused,
        "background": (False,),
        "conversation": (),
        "moderation": (),
        "n": (1,),
        "previous_response_id": (),
        "prompt": (),
        "prompt_logprobs": (),
        "truncation": ("disabled",),
    }
    instead: ClassVar[Mapping[str, str]] = {
        **GenerationRequest.instead,
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: Annotated[str | None, Field(description="the system's message, before the input")] = None
    max_output_tokens: TokenCount | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | NamespaceTool | WebSearch, Field(discriminator="type")]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ] = []
    tool_choice: FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: Annotated[list[str], Field(description=f"{LOGPROBS}: as logprobs of a chat")] = []
    top_logprobs: LogprobsCount = 0
    chat_template_kwargs: Annotated[
        JsonObject, Field(description="the template's own variables, such as enable_thinking")
    ] = {}
    # Without effect on the answer.
    max_tool_calls: int | None = None  # of tools that OpenAI runs, of which there are none
    client_metadata: dict[str, Any] = {}  # Codex sends it always

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        """The chat checks all others."""
        if unknown := [name for name in self.include if name not in _INCLUDED]:
            raise invalid(f"include: {echo(unknown[0])} is not supported: leave it out", param="include")
        if self.top_logprobs and LOGPROBS not in self.include:
            raise invalid(f"top_logprobs is only allowed when include has {LOGPROBS}", param="top_logprobs")
        with own_names():
            _ = self.chat  # raises
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @cached_property
    def chat(self) -> ChatRequest:
        """The same as a chat. Raises ApiError where tools and choice contradict each other."""
        shared = self.model_fields_set & GenerationRequest.model_fields.keys()
        given: dict[str, Any] = {name: getattr(self, name) for name in shared}
        if self.text.format is not None:
            given["response_format"] = self.text.format.as_chat()
        choice: ToolChoice = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.as_chat()
        return ChatRequest(
            **given,
            messages=_messages(self.instructions, self.input),
            max_completion_tokens=self.max_output_tokens,
            tools=self._functions(),
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort,
            logprobs=LOGPROBS in self.include,
            top_logprobs=self.top_logprobs,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _functions(self) -> list[Tool]:
        functions: list[Tool] = []
        for tool in self.tools:
            if isinstance(tool, FunctionTool):
                functions.append(tool.as_chat())
            elif isinstance(tool, NamespaceTool):
                functions += tool.as_chat()
        if len(functions) > MAX_TOOLS:
            raise invalid(f"tools has {len(functions)} functions, expected at most {MAX_TOOLS}", param="tools")
        return functions

    @cached_property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Namespace and name of the functions that have one, by the name that the model sees."""
        spaces = [tool for tool in self.tools if isinstance(tool, NamespaceTool)]
        return {joined_name(space.name, tool.name): (space.name, tool.name) for space in spaces for tool in space.tools}


def _messages(instructions: str | None, given: str | Sequence[InputItem]) -> list[Message]:
    """Instructions and the system's messages at the beginning are one message, as templates take no more."""
    items = [InputMessage(role="user", content=given)] if isinstance(given, str) else given
    leading = [_text(item.content) for item in takewhile(_is_of_system, items) if isinstance(item, InputMessage)]
    texts = [instructions, *leading] if instructions else leading
    messages = [Message(role="system", content="\n\n".join(texts))] if texts else []
    for item in items[len(leading) :]:
        if isinstance(item, FunctionCallOutput):
            messages.append(Message(role="tool", content=_content(item.output), tool_call_id=item.call_id))
        elif isinstance(item, InputMessage) and item.role != "assistant":
            messages.append(Message(role=item.role, content=_content(item.content)))
        else:
            _add_of_assistant(messages, item)
    if not messages:  # reasoning without text
        raise invalid("input holds no message: expected at least one", param="input")
    return messages


def _is_of_system(item: InputItem) -> bool:
    return isinstance(item, InputMessage) and item.role in ("system", "developer")


def _add_of_assistant(messages: list[Message], item: InputMessage | InputReasoning | FunctionCall) -> None:
    """One message has the reasoning, the text after it and the calls, as chats have them."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if isinstance(item, FunctionCall):
        name = joined_name(item.namespace, item.name)
        call = ToolCall(id=item.call_id, function=CalledFunction(name=name, arguments=item.arguments))
        if last is not None:
            last.tool_calls.append(call)
        else:
            messages.append(Message(role="assistant", tool_calls=[call]))
    elif isinstance(item, InputReasoning):
        if item.text:
            messages.append(Message(role="assistant", reasoning_content=item.text))
    elif last is not None and last.content is None:
        last.content = _content(item.content)
    else:
        messages.append(Message(role="assistant", content=_content(item.content)))


def _text(content: _Texts) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _content(given: _Texts) -> str | list[TextPart]:
    return given if isinstance(given, str) else [TextPart(type="text", text=part.text) for part in given]


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText] = []


class OutputReasoning(BaseModel):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[OutputReasoningText] = []


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    namespace: Annotated[str | None, Field(description="of the tool that has the function, if it has one")] = None
    arguments: Annotated[str, Field(description="JSON, as the model wrote it")] = ""


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: Annotated[Literal[0], Field(description="OpenAI charges for them")] = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    code: str
    message: str


class Response(BaseModel):
    """With what was asked for, as OpenAI's."""

    id: str
    object: Literal["response"] = "response"
    created_at: Annotated[int, Field(description="seconds since 1970")]
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    metadata: dict[str, Any]
