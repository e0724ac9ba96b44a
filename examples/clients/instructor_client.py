"""instructor: `pip install instructor`. OPENAI_BASE_URL and OPENAI_API_KEY name the server, the argument its model."""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Sky(BaseModel):
    """What the sky looks like."""

    clouds: Literal["none", "few", "many"]
    raining: bool
    degrees: int = Field(ge=-40, le=50)


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(), mode=mode)
    sky = client.chat.completions.create(
        model=sys.argv[1],
        messages=[{"role": "user", "content": "How is the sky?"}],
        response_model=Sky,
        max_tokens=512,
        max_retries=0,
    )
    assert isinstance(sky, Sky)
    print(f"{mode.value}:", sky)
