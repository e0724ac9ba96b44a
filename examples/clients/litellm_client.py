"""LiteLLM: `pip install litellm mcp`. OPENAI_BASE_URL and OPENAI_API_KEY name the server, the argument its model."""

import os
import sys

import litellm

MODEL = f"hosted_vllm/{sys.argv[1]}"  # the provider whose parameters this server shares
SERVER = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
MESSAGES = [{"role": "user", "content": "What is a Pod?"}]
LAMP = {
    "type": "function",
    "function": {
        "name": "switch_lamp",
        "description": "Switch a lamp on or off",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
}

answer = litellm.completion(MODEL, MESSAGES, max_tokens=32, **SERVER)
assert answer.usage.completion_tokens > 0
print("completion:", answer.choices[0].message.content)

pieces = litellm.completion(MODEL, MESSAGES, max_tokens=32, stream=True, **SERVER)
print("stream:", "".join(piece.choices[0].delta.content or "" for piece in pieces))

called = litellm.completion(MODEL, MESSAGES, max_tokens=512, tools=[LAMP], tool_choice="required", **SERVER)
call = called.choices[0].message.tool_calls[0].function
assert call.name == "switch_lamp"
print("tool:", call.name, call.arguments)

print(
    "text_completion:", litellm.text_completion(model=MODEL, prompt="A Pod is", max_tokens=8, **SERVER).choices[0].text
)

vectors = litellm.embedding(MODEL, input=["one", "two"], **SERVER).data
assert len(vectors) == 2
print("embedding:", len(vectors[0]["embedding"]), "numbers each")

try:
    litellm.completion(MODEL, MESSAGES, max_tokens=10**6, **SERVER)
except litellm.ContextWindowExceededError as error:
    print("ContextWindowExceededError:", str(error).splitlines()[0])
else:
    raise AssertionError("a million tokens were accepted")
