from __future__ import annotations

from typing import Any

import openai
import pytest


@pytest.fixture
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
