"""What a request says about the shape of its answer, as a grammar for the engine."""

from __future__ import annotations

from llmservice_server.api.error import ApiError, invalid
from llmservice_server.api.request import ChatRequest, GenerationRequest
from llmservice_server.api.tools import NamedTool
from llmservice_server.sampling.grammar import GrammarError, check_grammar, json_grammar
from llmservice_server.text.tokenizer import Tokenizer


def answer_grammar(request: GenerationRequest, tokenizer: Tokenizer) -> str | None:
    """None where every answer will do. Compiles what it returns: milliseconds, up to a second for a huge schema.

    Raises ApiError (400) that says why no answer can be held to it.
    """
    param, grammar = "response_format", None
    if isinstance(request, ChatRequest) and request.callable_tools:
        param, grammar = "tools", _tool_grammar(request, tokenizer)
    elif request.structured_outputs is not None:
        param, grammar = "structured_outputs", request.structured_outputs.as_grammar()
    elif request.schema is not None:
        grammar = json_grammar(request.schema)
    if grammar is None:
        return None
    if request.min_tokens > 0:
        raise invalid(f"min_tokens cannot be combined with {param}, which decides where an answer ends", "min_tokens")
    try:
        check_grammar(grammar)
    except GrammarError as error:
        raise invalid(f"{param}: no answer can be held to this: {error}", param=param) from error
    return grammar


def _tool_grammar(request: ChatRequest, tokenizer: Tokenizer) -> str:
    layout = tokenizer.tool_format
    if layout is None:
        raise _no_tools()
    if request.structured_outputs is not None and request.schema is None:
        raise invalid("structured_outputs beside tools must be json", param="structured_outputs")
    if request.schema is not None and request.tool_choice == "auto" and not layout.trigger:
        raise invalid(
            "response_format and tools cannot be told apart with this model, which writes both as bare JSON: "
            "leave one out, or set tool_choice",
            param="response_format",
        )
    named = isinstance(request.tool_choice, NamedTool)
    return layout.grammar(
        request.callable_tools,
        tokenizer.tag_ids,
        required=request.tool_choice != "auto",
        parallel=request.parallel_tool_calls and not named,
        otherwise=request.schema,
    )


def _no_tools() -> ApiError:
    return invalid(
        "this model's chat template teaches no way of calling tools that this server knows: use response_format, or a "
        "model with tools (Qwen 2.5 and 3, Hermes, Llama 3.1)",
        param="tools",
    )
