"""Events that are written together, as those of several steps are when the client or this process is slow.

And whole answers, which must not delay the events of other requests.
"""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from pydantic import BaseModel

from llmservice_server.http.completion_format import CompletionFormat
from llmservice_server.http.protocol.completions import CompletionRequest
from llmservice_server.http.protocol.generation import StreamOptions
from llmservice_server.http.response import Chunk
from llmservice_server.http.routes.generate import ChunkWriter, whole
from llmservice_server.ipc.metrics import Metrics
from llmservice_server.text.output_processor import OutputProcessor
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.tiny import tokenizer as tiny_tokenizer
from llmservice_server.types.messages import GenerateRequest, Output, SamplingParams


def test_each_event_counts_the_tokens_up_to_it() -> None:
    library = tiny_tokenizer.train(1024)
    tokenizer = Tokenizer(library, eos_token_ids=frozenset({2}))
    request = GenerateRequest(
        request_id="r", prompt_token_ids=[5, 6], sampling=SamplingParams(max_tokens=3), arrival_s=100.0
    )
    processor = OutputProcessor([request], tokenizer, Metrics("llmservice_", "tiny"))
    body = CompletionRequest.model_validate({"model": "tiny", "prompt": [5, 6], "stream": True})
    chunk = Chunk("cmpl-r", "text_completion", 0, "tiny")
    options = StreamOptions(continuous_usage_stats=True)
    writer = ChunkWriter(processor, chunk, CompletionFormat(body, processor), options)
    steps = [Output(request_id="r-0", token_ids=[token_id]) for token_id in library.encode("abc").ids[1:4]]
    events = [json.loads(line) for line in writer.events(processor.process(steps, 101.0)).split(b"data: ")[1:]]
    assert [event["usage"]["completion_tokens"] for event in events] == [*range(1, len(events) + 1)]
    assert len(events) > 1


@pytest.mark.parametrize(("num_logprobs", "in_loop"), [(0, True), (10, True), (100_000, False)])
def test_answer_with_many_logprobs_is_written_outside_the_event_loop(num_logprobs: int, in_loop: bool) -> None:
    threads = []

    class Answer(BaseModel):
        id: str = "cmpl-é"

    def answer() -> Answer:
        threads.append(threading.current_thread())
        return Answer()

    response = asyncio.run(whole(num_logprobs, answer))
    assert (response.body, response.media_type) == ('{"id":"cmpl-é"}'.encode(), "application/json")
    assert [thread is threading.current_thread() for thread in threads] == [in_loop]
