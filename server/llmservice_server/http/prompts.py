"""From a body to what the engine reads: token ids of texts and conversations, and the answer's grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from llmservice_server.engine.adapters import adapter_key
from llmservice_server.engine.block_pool import chain_start, hash_blocks
from llmservice_server.http.error import ApiError, invalid
from llmservice_server.http.protocol.chat import ChatRequest, NamedTool, Tool, as_template_input
from llmservice_server.http.protocol.generation import GenerationRequest
from llmservice_server.http.protocol.tokenize import TokenizeRequest
from llmservice_server.sampling.grammar import check_grammar, json_grammar
from llmservice_server.text.chat_template import TemplateOptions
from llmservice_server.text.tokenizer import TextTooLongError, Tokenizer
from llmservice_server.text.tool_calls import ToolSchema
from llmservice_server.types.errors import GrammarError
from llmservice_server.types.messages import AdapterInfo, Ready


def token_ids(
    inputs: Sequence[str | list[int]],
    tokenizer: Tokenizer,
    max_tokens: int | None,
    param: str,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Raises ApiError (400) for a text that is certainly longer than `max_tokens`."""
    texts = [given for given in inputs if isinstance(given, str)]
    try:
        encoded = iter(tokenizer.encode_all(texts, add_special_tokens=add_special_tokens, max_tokens=max_tokens))
    except TextTooLongError as error:
        raise _too_long(error, param) from error
    return [next(encoded) if isinstance(given, str) else given for given in inputs]


def require_known(ids: Iterable[int], tokenizer: Tokenizer, param: str) -> None:
    """Raises ApiError (400) for a token id outside the vocabulary."""
    if (largest := max(ids, default=0)) >= tokenizer.vocab_size:
        raise invalid(f"{param}: token id {largest} is outside the vocabulary of {tokenizer.vocab_size}", param)


def truncated(prompts: list[list[int]], num_tokens: int | None, room: int) -> list[list[int]]:
    """The last `num_tokens` of each prompt; -1: as many as there is `room` for; None: all."""
    if num_tokens is None:
        return prompts
    kept = room if num_tokens == -1 else num_tokens
    return [ids[max(0, len(ids) - kept) :] for ids in prompts]


def prompt_hashes(
    prompts: Sequence[list[int]], ready: Ready, salt: str | None, adapter: AdapterInfo | None
) -> list[bytes]:
    """The hashes of each prompt's blocks, which the engine thus need not compute between two steps."""
    if not ready.prefix_caching:
        return [b""] * len(prompts)
    start = chain_start(salt, None if adapter is None else adapter_key(adapter.name, adapter.version))
    return [hash_blocks(ids[: ready.max_request_tokens], ready.block_size, start) for ids in prompts]


def bad_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenized at the start of a text and after a space."""
    texts = [start + word.lstrip() for word in words for start in ("", " ")]
    ids = tokenizer.encode_all(texts, add_special_tokens=False) if texts else []
    return tuple(dict.fromkeys(tuple(each) for each in ids if each))


def chat_token_ids(
    asked: ChatRequest | TokenizeRequest, tools: Sequence[Tool], tokenizer: Tokenizer, max_tokens: int | None
) -> list[int]:
    """Raises ApiError where the options contradict each other, or the template does not accept the conversation.

    Likewise where the conversation is certainly longer than `max_tokens`.
    """
    messages = asked.messages or []
    if asked.continue_final_message and asked.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt contradict each other: give one of them",
            param="continue_final_message",
        )
    if asked.continue_final_message and messages[-1].role != "assistant":
        raise invalid(
            f"continue_final_message: the last message is the {messages[-1].role}'s, expected the assistant's",
            param="continue_final_message",
        )
    options = TemplateOptions(
        begin_answer=asked.add_generation_prompt is not False and not asked.continue_final_message,
        continue_last=asked.continue_final_message,
        variables=tokenizer.template_variables(asked.reasoning_effort) | asked.chat_template_kwargs,
    )
    try:
        given = [message.as_template_input() for message in messages]
        return tokenizer.encode_chat(given, as_template_input(tools) if tools else None, options, max_tokens)
    except TextTooLongError as error:
        raise _too_long(error, "messages") from error
    except ValueError as error:  # ChatTemplateError, or the arguments of a call
        raise invalid(str(error), param="messages") from error


def _too_long(error: TextTooLongError, param: str) -> ApiError:
    return invalid(str(error), param=param, code="context_length_exceeded")


def answer_grammar(request: GenerationRequest, tokenizer: Tokenizer, prompt: Sequence[int]) -> str | None:
    """None where every answer is allowed. Compiles what it returns: milliseconds, up to a second for a huge schema.

    `prompt` is the first one: it shows whether the answer begins with reasoning. Raises ApiError (400) where no answer
    can be held to the grammar.
    """
    if not request.is_structured:
        return None
    param = "response_format" if request.structured_outputs is None else "structured_outputs"
    if isinstance(request, ChatRequest) and request.callable_tools:
        param = "tools"
    if request.min_tokens > 0:
        raise invalid(f"min_tokens cannot be combined with {param}, which decides where an answer ends", "min_tokens")
    grammar: str | None = None
    try:
        if request.structured_outputs is not None:
            grammar = request.structured_outputs.as_grammar()
        elif request.answer_schema is not None:
            grammar = json_grammar(request.answer_schema)
        if isinstance(request, ChatRequest):
            grammar = _chat_grammar(request, tokenizer, prompt, grammar)
        check_grammar(grammar or "")
    except GrammarError as error:
        raise invalid(f"{param}: no answer can be held to this: {error}", param=param) from error
    return grammar


def _chat_grammar(request: ChatRequest, tokenizer: Tokenizer, prompt: Sequence[int], answer: str | None) -> str:
    """With the reasoning and the tool calls that may stand before an answer, or instead of it."""
    formats, beginning = tokenizer.formats, tokenizer.beginning(prompt, request.continued)
    if not request.callable_tools:
        return formats.behind_reasoning(answer or "", beginning)
    if not formats.can_call:
        raise invalid(
            "this model's chat template shows no tools, or in no format that this server knows: use response_format, "
            "set --chat-template to one that does, set --tool-call-format, or use a model with tools (Qwen, Hermes, "
            "Mistral, Llama 3.1, gpt-oss)",
            param="tools",
        )
    if request.structured_outputs is not None and request.answer_schema is None:
        raise invalid("structured_outputs beside tools must be json", param="structured_outputs")
    if answer is not None and not request.must_call and not formats.distinguishes_json:
        raise invalid(
            "response_format and tools cannot be distinguished with this model, which writes both as bare JSON: "
            "leave one out, or set tool_choice",
            param="response_format",
        )
    grammar_of = partial(
        formats.tool_grammar,
        beginning=beginning,
        required=request.must_call,
        parallel=request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool),
        otherwise=None if request.must_call else answer,
    )
    with suppress(GrammarError):
        grammar = grammar_of(request.callable_tools)
        check_grammar(grammar)
        return grammar
    return grammar_of([_expressible(tool, grammar_of) for tool in request.callable_tools])


def _expressible(tool: ToolSchema, grammar_of: Callable[[Sequence[ToolSchema]], str]) -> ToolSchema:
    """With any arguments, unless the tool is strict, where no grammar holds an answer to its schema."""
    try:
        check_grammar(grammar_of([tool]))
    except GrammarError as error:
        if tool.strict:
            raise GrammarError(f"the parameters of {tool.name}: {error}") from error
        return replace(tool, arguments={"type": "object"})
    return tool
