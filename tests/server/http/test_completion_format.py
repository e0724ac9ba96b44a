"""The log-probabilities of /v1/completions."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models

from llmservice_server.http.completion_format import CompletionFormat
from llmservice_server.http.protocol.completions import CompletionRequest
from llmservice_server.text.output_processor import OutputProcessor, RequestState
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.types.messages import GenerateRequest, Output, SamplingParams, TokenLogprobs


class _Unrecorded:
    def record_first_tokens(self, state: RequestState, num_tokens: int) -> None: ...

    def record_tokens(self, num_tokens: int, since_last_s: float) -> None: ...

    def record_finished(self, state: RequestState) -> None: ...


def _entries(token_ids: list[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token_id, -1.0, []) for token_id in token_ids)


@pytest.mark.parametrize(
    ("echo", "text", "offsets"), [(True, "the man the", [0, 0, 3, 7]), (False, " the", [0])], ids=["echo", "answer"]
)
def test_offsets_are_those_of_the_text_where_the_decoder_drops_a_first_space(
    echo: bool, text: str, offsets: list[int]
) -> None:
    """As those of Llama 2 and Mistral do."""
    vocabulary = {"<s>": 0, "\u2581the": 1, "\u2581man": 2}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    library.add_special_tokens(["<s>"])
    prompt = GenerateRequest(request_id="r", prompt_token_ids=[0, 1, 2], sampling=SamplingParams(), arrival_s=0.0)
    processor = OutputProcessor([prompt], Tokenizer(library), _Unrecorded(), final_only=True)
    request = CompletionRequest(model="m", prompt="the man", echo=echo, logprobs=0)
    output = Output(
        request_id="r-0",
        token_ids=[1],
        finish_reason="length",
        logprobs=_entries([1]),
        prompt_logprobs=_entries([1, 2]) if echo else (),
    )
    answer = CompletionFormat(request, processor).answer("cmpl", 0, "m", processor.process([output], 1.0))
    assert answer.choices[0].text == text
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == offsets
