"""A conversation as the ids that the model reads: its chat template, with what a client may say to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llmservice_server.api.error import invalid
from llmservice_server.api.long_input import text_too_long
from llmservice_server.api.message import Message
from llmservice_server.api.tools import Tool, as_template_input
from llmservice_server.text.chat_template import TemplateOptions
from llmservice_server.text.tokenizer import TextTooLongError, Tokenizer


class Conversation(Protocol):
    """What the bodies that bring one have in common; the three options are vLLM's."""

    @property
    def add_generation_prompt(self) -> bool | None:
        """Whether the assistant's turn is begun; None: unless its last message is continued."""

    @property
    def continue_final_message(self) -> bool:
        """Whether the assistant goes on with the last message, instead of answering it."""

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """The template's own variables, such as `enable_thinking`."""


def chat_prompt(
    asked: Conversation, messages: Sequence[Message], tools: Sequence[Tool], tokenizer: Tokenizer, max_tokens: int
) -> list[int]:
    """Raises ApiError where the options contradict each other, or the template does not take the conversation.

    Likewise where the conversation is certainly longer than `max_tokens`.
    """
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
        variables=asked.chat_template_kwargs,
    )
    try:
        given = [message.as_template_input() for message in messages]
        return tokenizer.encode_chat(given, as_template_input(tools) if tools else None, options, max_tokens)
    except TextTooLongError as error:
        raise text_too_long(error, "messages") from error
    except ValueError as error:  # ChatTemplateError, or what a message says of itself
        raise invalid(str(error), param="messages") from error
