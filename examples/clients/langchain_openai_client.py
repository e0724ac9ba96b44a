"""LangChain: `pip install langchain-openai`. OPENAI_BASE_URL and OPENAI_API_KEY name the server, argv its model."""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Sky(BaseModel):
    """What the sky looks like."""

    clouds: Literal["none", "few", "many"]
    raining: bool


@tool
def switch_lamp(room: Literal["kitchen", "hall"], on: bool) -> str:
    """Switch a lamp on or off."""
    return f"the lamp in the {room} is {'on' if on else 'off'}"


model = ChatOpenAI(model=sys.argv[1], max_completion_tokens=512)

answer = model.invoke([("system", "Be brief."), ("human", "What is a Pod?")])
assert answer.usage_metadata["output_tokens"] > 0
print("invoke:", answer.content)

pieces = list(model.stream("What is a Pod?", stream_usage=True))
assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) > 0
print("stream:", "".join(piece.content for piece in pieces))

print("batch:", [each.content for each in model.batch(["One", "Two"])])

sky = model.with_structured_output(Sky).invoke("How is the sky?")
assert isinstance(sky, Sky)
print("with_structured_output:", sky)

with_tools = model.bind_tools([switch_lamp], tool_choice="any", parallel_tool_calls=False)
question = HumanMessage("Switch on the lamp in the hall.")
asked = with_tools.invoke([question])
assert asked.tool_calls
called = [ToolMessage(switch_lamp.invoke(call["args"]), tool_call_id=call["id"]) for call in asked.tool_calls]
print("tool:", called[0].content)
print("answer to it:", model.invoke([question, asked, *called]).content)

# LangChain would otherwise tokenize the texts for OpenAI's own models.
vectors = OpenAIEmbeddings(model=sys.argv[1], check_embedding_ctx_length=False).embed_documents(["one", "two"])
assert len(vectors) == 2
print("embeddings:", len(vectors[0]), "numbers each")
