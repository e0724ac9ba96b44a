"""The choices of /v1/chat/completions, with their reasoning, tool calls and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from llmservice_server.http.protocol.chat import (
    AnsweredFunction,
    AnsweredMessage,
    AnsweredToolCall,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    NamedTool,
    TokenLogprob,
    TopLogprob,
)
from llmservice_server.http.response import Choice, prompt_logprobs, usage
from llmservice_server.text.detokenizer import TokenBytes
from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor
from llmservice_server.text.tool_calls import Call, Parsed, merge
from llmservice_server.types.messages import TokenLogprobs


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """The first piece of a call has its id and name, the others have more of its arguments."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    content: str | None = None
    reasoning_content: str | None = None
    role: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatDelta(Choice):
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatFormat:
    """In a stream the finish reason has an event of its own, after the last text."""

    id_prefix: ClassVar[str] = "chatcmpl"
    chunk: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, processor: OutputProcessor) -> None:
        tokenizer = processor.tokenizer
        self._processor = processor
        self._token_bytes = tokenizer.token_bytes
        self._with_logprobs = request.logprobs
        self._with_prompt_logprobs = request.prompt_logprobs is not None
        self._has_named_tool = isinstance(request.tool_choice, NamedTool)
        beginning = tokenizer.beginning(processor.states[0].request.prompt_token_ids, request.continued)
        tools, formats = request.callable_tools, tokenizer.formats
        self._parsers = [formats.parser(tools, beginning) for _ in processor.states]  # by choice
        self._reasoning = [tokenizer.reasoning_tokens(beginning) for _ in processor.states]  # likewise

    @property
    def num_reasoning_tokens(self) -> int | None:
        counters = [counter for counter in self._reasoning if counter is not None]
        return sum(counter.num_tokens for counter in counters) if counters else None

    @property
    def in_call(self) -> bool:
        """Whether the arguments of a call are incomplete."""
        return any(parser.in_call for parser in self._parsers)

    def answer(self, identity: str, created: int, model: str, outputs: Sequence[CompletionOutput]) -> ChatCompletion:
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        answer = ChatCompletion(
            id=identity,
            created=created,
            model=model,
            choices=choices,
            usage=usage(self._processor, num_reasoning=self.num_reasoning_tokens),
        )
        if self._with_prompt_logprobs:
            answer.prompt_logprobs = prompt_logprobs(self._processor.states[0].prompt_logprobs, self._token_bytes)
        return answer

    def opening(self, index: int) -> Sequence[Choice]:
        return [ChatDelta(index, Delta(role="assistant", content=""))]

    def _choice(self, index: int, output: CompletionOutput) -> ChatChoice:
        parsed = self._parse(output)
        calls = [
            AnsweredToolCall(
                id=call.id or "", function=AnsweredFunction(name=call.name or "", arguments=call.arguments)
            )
            for call in merge(parsed.calls)
        ]
        content = parsed.content if parsed.content.strip() or not (calls or parsed.reasoning) else None
        return ChatChoice(
            index=index,
            message=AnsweredMessage(content=content, reasoning_content=parsed.reasoning or None, tool_calls=calls),
            finish_reason=self._finish_reason(output),
            logprobs=self._logprobs(output),
        )

    def delta(self, output: CompletionOutput) -> Sequence[Choice]:
        parts: list[Choice] = []
        index, logprobs, parsed = output.index, self._logprobs(output), self._parse(output)
        calls = [_call_delta(call) for call in merge(parsed.calls)] or None
        reasoning = parsed.reasoning or None
        if parsed.content or calls or reasoning or (logprobs is not None and logprobs.content):
            content = parsed.content if parsed.content or not (calls or reasoning) else None
            parts.append(ChatDelta(index, Delta(content, reasoning, tool_calls=calls), None, logprobs))
        if output.finish_reason is not None:
            parts.append(ChatDelta(index, Delta(), self._finish_reason(output)))
        return parts

    def _parse(self, output: CompletionOutput) -> Parsed:
        """Separate the content from the reasoning and the tool calls."""
        parser, counter = self._parsers[output.index], self._reasoning[output.index]
        if counter is not None:
            counter.append(output.token_ids)
        parsed = parser.append(output.text)
        if output.finish_reason is not None:
            parsed.extend(parser.flush())
        return parsed

    def _finish_reason(self, output: CompletionOutput) -> str | None:
        """As at OpenAI, a call of the tool that the request names ends with "stop"; so does one that it cuts off."""
        parser = self._parsers[output.index]
        called = parser.num_calls > 0 and not parser.in_call and not self._has_named_tool
        return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        return chat_logprobs(output.logprobs, self._token_bytes) if self._with_logprobs else None


def _call_delta(call: Call) -> ToolCallDelta:
    function = FunctionDelta(call.name, call.arguments)
    return ToolCallDelta(call.index, function, call.id, None if call.id is None else "function")


def chat_logprobs(entries: Sequence[TokenLogprobs], tokens: TokenBytes) -> ChatLogprobs:
    def of(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(token=tokens.text(token_id), logprob=logprob, bytes=list(tokens[token_id]) or None)

    return ChatLogprobs(
        content=[
            TokenLogprob(
                **dict(of(entry.token_id, entry.logprob)),
                top_logprobs=[of(token_id, logprob) for token_id, logprob in entry.top],
            )
            for entry in entries
        ]
    )
