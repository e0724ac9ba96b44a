"""The output items of /v1/responses and their events, made of a chat's deltas."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from llmservice_server.http.chat_format import ChatDelta, ChatFormat, ToolCallDelta
from llmservice_server.http.error import ApiError
from llmservice_server.http.protocol.chat import TokenLogprob
from llmservice_server.http.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    NamespaceTool,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputReasoningText,
    OutputText,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponsesRequest,
    ResponseUsage,
    WebSearch,
)
from llmservice_server.http.response import event, usage
from llmservice_server.text.output_processor import CompletionOutput, OutputProcessor

Event = dict[str, Any]
_Item = OutputMessage | OutputReasoning | OutputCall


class ResponsesFormat:
    """Implements `EventWriter`: one answer, whole or as events."""

    end = b""

    def __init__(self, request: ResponsesRequest, processor: OutputProcessor, created: int, model: str) -> None:
        self._processor = processor
        self._chat = ChatFormat(request.chat, processor)
        self._response = Response(
            id=f"resp_{processor.request_id}",
            created_at=created,
            model=model,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            parallel_tool_calls=request.parallel_tool_calls,
            reasoning={"effort": request.reasoning.effort, "summary": None},
            temperature=request.chat.temperature,
            text=_dumped(request.text) | ({"format": {"type": "text"}} if request.text.format is None else {}),
            tool_choice=request.tool_choice if isinstance(request.tool_choice, str) else _dumped(request.tool_choice),
            tools=[
                _dumped(each)
                if isinstance(each, NamespaceTool)
                else {"description": None, "parameters": None, "strict": False} | _dumped(each)
                for each in request.tools
                if not isinstance(each, WebSearch)
            ],
            top_logprobs=request.top_logprobs,
            top_p=request.chat.top_p,
            metadata=request.metadata,
        )
        self._namespaces = request.namespaces
        self._open: _Item | None = None
        self._pieces: list[str] = []  # of its text or arguments, which are joined at its end
        self._held = ""  # spaces before a text, which are none of it where a call follows
        self._logprobs: list[TokenLogprob] = []  # of tokens before a text
        self._num_events = 0

    def answer(self, outputs: Sequence[CompletionOutput]) -> Response:
        for output in outputs:
            for _ in self._of(output):
                pass
        return self._response

    def opening(self) -> bytes:
        return self._written(
            {"type": f"response.{kind}", "response": self._response} for kind in ("created", "in_progress")
        )

    def events(self, outputs: Sequence[CompletionOutput]) -> bytes:
        return self._written(each for output in outputs for each in self._of(output))

    def closing(self) -> bytes:
        return self._written([{"type": f"response.{self._response.status}", "response": self._response}])

    def failed(self, error: ApiError) -> bytes:
        self._fill()
        self._response.status = "failed"
        self._response.error = ResponseError(code="server_error", message=error.message)
        return self.closing()

    def _written(self, events: Iterator[Event] | Sequence[Event]) -> bytes:
        written = []
        for each in events:
            numbered = {**each, "sequence_number": self._num_events}
            written.append(b"event: " + each["type"].encode() + b"\n" + event(numbered))
            self._num_events += 1
        return b"".join(written)

    def _of(self, output: CompletionOutput) -> Iterator[Event]:
        for part in self._chat.delta(output):
            if isinstance(part, ChatDelta):
                yield from self._of_delta(part)

    def _of_delta(self, part: ChatDelta) -> Iterator[Event]:
        delta = part.delta
        if part.logprobs is not None:
            self._logprobs += part.logprobs.content
        if delta.reasoning_content:
            yield from self._add_reasoning(delta.reasoning_content)
        if delta.content is not None:  # "": of tokens whose text is not complete yet, or is none
            yield from self._add_text(delta.content)
        for call in delta.tool_calls or ():
            yield from self._add_call(call)
        if part.finish_reason is not None:
            yield from self._finish(part.finish_reason)

    def _add_reasoning(self, text: str) -> Iterator[Event]:
        item = self._open
        if not isinstance(item, OutputReasoning):
            item = OutputReasoning(id=_name("rs"))
            yield from self._begin(item)
            item.content.append(OutputReasoningText())
            yield self._about(item, "content_part.added", part=item.content[0], content_index=0)
        self._pieces.append(text)
        yield self._about(item, "reasoning_text.delta", delta=text, content_index=0)

    def _add_text(self, text: str, *, even_blank: bool = False) -> Iterator[Event]:
        item = self._open
        if not isinstance(item, OutputMessage):
            text, self._held = self._held + text, ""
            if not (text.strip() or even_blank):
                self._held = text
                return
            item = OutputMessage(id=_name("msg"))
            yield from self._begin(item)
            item.content.append(OutputText())
            yield self._about(item, "content_part.added", part=item.content[0], content_index=0)
        logprobs, self._logprobs = self._logprobs, []
        self._pieces.append(text)
        item.content[0].logprobs += logprobs
        yield self._about(item, "output_text.delta", delta=text, content_index=0, logprobs=logprobs)

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        item = self._open
        if call.id is not None or not isinstance(item, OutputCall):
            seen = call.function.name or ""
            namespace, name = self._namespaces.get(seen, (None, seen))
            item = OutputCall(id=_name("fc"), call_id=call.id or _name("call"), name=name, namespace=namespace)
            yield from self._begin(item)
        if call.function.arguments:
            self._pieces.append(call.function.arguments)
            yield self._about(item, "function_call_arguments.delta", delta=call.function.arguments)

    def _begin(self, item: _Item) -> Iterator[Event]:
        yield from self._close()
        self._open = item
        self._response.output.append(item)
        yield self._about(item, "output_item.added", item=item)

    def _close(self, *, complete: bool = True) -> Iterator[Event]:
        self._fill()
        item, self._open, self._held = self._open, None, ""
        if item is None:
            return
        if isinstance(item, OutputCall):
            yield self._about(item, "function_call_arguments.done", arguments=item.arguments, name=item.name)
        elif isinstance(item, OutputReasoning):
            [reasoning] = item.content
            yield self._about(item, "reasoning_text.done", text=reasoning.text, content_index=0)
            yield self._about(item, "content_part.done", part=reasoning, content_index=0)
        else:
            [text] = item.content
            yield self._about(item, "output_text.done", text=text.text, content_index=0, logprobs=text.logprobs)
            yield self._about(item, "content_part.done", part=text, content_index=0)
        item.status = "completed" if complete else "incomplete"
        yield self._about(item, "output_item.done", item=item)

    def _fill(self) -> None:
        """Give the open item what has come of it."""
        text, self._pieces = "".join(self._pieces), []
        if isinstance(self._open, OutputCall):
            self._open.arguments += text
        elif self._open is not None:
            self._open.content[0].text += text

    def _finish(self, reason: str) -> Iterator[Event]:
        response, complete = self._response, reason != "length"
        if not response.output:
            yield from self._add_text("", even_blank=True)
        yield from self._close(complete=complete and not self._chat.in_call)  # a stop string may end a call
        response.status = "completed" if complete else "incomplete"
        if not complete:
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        counted = usage(self._processor, num_reasoning=self._chat.num_reasoning_tokens)
        response.usage = ResponseUsage(
            input_tokens=counted.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=counted.prompt_tokens_details.cached_tokens),
            output_tokens=counted.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._chat.num_reasoning_tokens or 0),
            total_tokens=counted.total_tokens,
        )

    def _about(self, about: _Item, kind: str, **fields: Any) -> Event:
        named = fields if "item" in fields else {"item_id": about.id, **fields}
        return {"type": f"response.{kind}", "output_index": len(self._response.output) - 1, **named}


def _dumped(part: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = part.model_dump(exclude_unset=True, by_alias=True)
    return dumped


def _name(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
