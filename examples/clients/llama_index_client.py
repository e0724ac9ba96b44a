"""LlamaIndex: `pip install llama-index-llms-openai-like`. OPENAI_BASE_URL and OPENAI_API_KEY name the server."""

import os
import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Sky(BaseModel):
    """What the sky looks like."""

    clouds: Literal["none", "few", "many"]
    raining: bool


def switch_lamp(room: Literal["kitchen", "hall"], on: bool) -> str:
    """Switch a lamp on or off."""
    return f"the lamp in the {room} is {'on' if on else 'off'}"


model = OpenAILike(
    model=sys.argv[1],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    context_window=4096,
    max_tokens=512,
    is_chat_model=True,
    is_function_calling_model=True,
)
question = [ChatMessage(role="user", content="What is a Pod?")]

print("chat:", model.chat(question).message.content)
print("stream_chat:", "".join(piece.delta or "" for piece in model.stream_chat(question)))
print("complete:", model.complete("A Pod is").text)

sky = model.as_structured_llm(Sky).chat([ChatMessage(role="user", content="How is the sky?")]).raw
assert isinstance(sky, Sky)
print("as_structured_llm:", sky)

lamp = FunctionTool.from_defaults(switch_lamp)
asked = model.chat_with_tools([lamp], user_msg="Switch on the lamp in the hall.", tool_required=True)
calls = model.get_tool_calls_from_response(asked)
print("tool:", lamp(**calls[0].tool_kwargs).content)
