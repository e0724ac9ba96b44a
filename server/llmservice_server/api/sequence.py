"""One choice of one request on its way from the engine to the client."""

from __future__ import annotations

from collections.abc import Sequence as Many

from llmservice_server.messages import FinishReason, Output, TokenLogprobs
from llmservice_server.metrics import Metrics
from llmservice_server.text.byte_detokenizer import ByteDetokenizer
from llmservice_server.text.detokenizer import Detokenizer
from llmservice_server.text.stop_strings import StopStrings
from llmservice_server.text.tokenizer import Tokenizer


class Sequence:
    """Turns the engine's ids into text that may be shown, and times them for the metrics (monotonic seconds)."""

    def __init__(
        self,
        *,
        request_id: str,
        index: int,
        prompt_index: int,
        prompt_token_ids: Many[int],
        stops: StopStrings,
        tokenizer: Tokenizer,
        arrival_s: float,
        min_tokens: int = 0,
    ) -> None:
        """`stops` are looked for in the text after the first `min_tokens`."""
        self.request_id = request_id
        self.index = index
        self.prompt_index = prompt_index
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stopped_by_string = False
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._logprobs: list[TokenLogprobs] = []
        self._min_tokens = min_tokens
        self._detokenizer: Detokenizer | ByteDetokenizer
        if tokenizer.decoded_bytes is None:
            self._detokenizer = Detokenizer(tokenizer, prompt_token_ids)
        else:
            self._detokenizer = ByteDetokenizer(tokenizer.decoded_bytes, prompt_token_ids)
        self._stops = stops
        self._arrival_s = arrival_s
        self._first_token_s: float | None = None
        self._last_token_s = arrival_s
        self._queue_s = 0.0

    def advance(self, output: Output, now: float, metrics: Metrics) -> str:
        """The text that this step makes certain. Sets `finish_reason` where it is the last."""
        if output.token_ids:
            self._observe(output, now, metrics)
        elif self._first_token_s is None:
            self._last_token_s = now  # it ends without a token
        if output.logprobs or output.prompt_logprobs:
            self._logprobs += output.logprobs
            self.prompt_logprobs += output.prompt_logprobs
        text = self._detokenizer.append(output.token_ids)
        if output.finish_reason is not None:
            text += self._detokenizer.flush()
        if self.num_tokens > self._min_tokens or not self._min_tokens:
            text = self._stops.append(text)
        if self._stops.matched is None and output.finish_reason is not None:
            text += self._stops.flush()
        if self._stops.matched is not None:
            self.stopped_by_string = output.finish_reason is None  # the engine does not know yet
            self.finish_reason = "stop"
        else:
            self.finish_reason = output.finish_reason
        return text

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Those that came since the last call."""
        logprobs, self._logprobs = self._logprobs, []
        return logprobs

    def _observe(self, output: Output, now: float, metrics: Metrics) -> None:
        self.num_tokens += len(output.token_ids)
        if self._first_token_s is None:
            metrics.tokens.begin(len(output.token_ids))
            self._first_token_s = now
            self._queue_s = output.queue_s or 0.0
            self.num_cached_tokens = output.num_cached_tokens
            ttft_s = now - self._arrival_s
            metrics.ttft.observe(ttft_s)
            metrics.queue_time.observe(self._queue_s)
            metrics.prefill_time.observe(max(0.0, ttft_s - self._queue_s))
            metrics.prompt_tokens.inc(self.num_prompt_tokens)
        else:
            metrics.tokens.go_on(len(output.token_ids), now - self._last_token_s)
        self._last_token_s = now

    def close(self, metrics: Metrics) -> None:
        """Count the sequence as ended: by `finish_reason`, or as aborted where the client left first."""
        reason = self.finish_reason or "abort"
        metrics.labels(metrics.request_success, finished_reason=reason).inc()
        if reason in ("stop", "length"):
            metrics.e2e.observe(self._last_token_s - self._arrival_s)
            metrics.request_prompt_tokens.observe(self.num_prompt_tokens)
            metrics.request_generation_tokens.observe(self.num_tokens)
            if self._first_token_s is not None:
                metrics.decode_time.observe(self._last_token_s - self._first_token_s)

    @property
    def ttft_s(self) -> float | None:
        return None if self._first_token_s is None else self._first_token_s - self._arrival_s
