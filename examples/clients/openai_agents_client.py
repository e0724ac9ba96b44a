"""OpenAI's Agents: `pip install openai-agents`. OPENAI_BASE_URL and OPENAI_API_KEY name the server, argv a model."""

import asyncio
import sys
from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from pydantic import BaseModel

set_tracing_disabled(True)  # else traces go to OpenAI


class Sky(BaseModel):
    """What the sky looks like."""

    clouds: Literal["none", "few", "many"]
    raining: bool


@function_tool
def switch_lamp(room: Literal["kitchen", "hall"], on: bool) -> str:
    """Switch a lamp on or off."""
    return f"the lamp in the {room} is {'on' if on else 'off'}"


async def main(model: str) -> None:
    limit = ModelSettings(max_tokens=512)  # the SDK raises an error for an answer that it cuts off
    watcher = Agent(name="Watcher", instructions="Be brief.", model=model, model_settings=limit, output_type=Sky)
    sky = (await Runner.run(watcher, "How is the sky?")).final_output
    assert isinstance(sky, Sky)
    print("run:", sky)

    streamed = Runner.run_streamed(watcher, "How is the sky?")
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert Sky.model_validate_json("".join(deltas)) == streamed.final_output
    print("run_streamed:", len(deltas), "pieces")

    butler = Agent(
        name="Butler",
        model=model,
        tools=[switch_lamp],
        model_settings=ModelSettings(max_tokens=512, tool_choice="required", parallel_tool_calls=False),
        tool_use_behavior="stop_on_first_tool",
    )
    print("tool:", (await Runner.run(butler, "Switch on the lamp in the hall.")).final_output)


asyncio.run(main(sys.argv[1]))
