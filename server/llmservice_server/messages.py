"""The messages between the HTTP process and the engine process: msgspec structs, encoded as MessagePack over zmq."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence is sampled. Stop *strings* are the HTTP process's business: it aborts when one matches."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()  # end of sequence included; the stop token is never returned
    min_tokens: int = 0  # before these no stop token is drawn
    ignore_eos: bool = False
    logprobs: int | None = None  # the likeliest tokens told beside each drawn one; None: no probabilities at all
    prompt_logprobs: int | None = None  # likewise for the tokens of the prompt
    grammar: str | None = None  # llguidance's JSON; the answer is a sentence of it

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def is_plain(self) -> bool:
        """Nothing changes the model's logits before they are sampled, and nobody asks to be told of them."""
        changed = self.has_penalties or self.logit_bias or self.min_tokens or self.grammar is not None
        return not changed and self.logprobs is None


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate", omit_defaults=True):
    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_s: float  # time.monotonic() of the HTTP process; both processes share the machine's clock
    lane: str = "interactive"
    deadline_s: float | None = None  # monotonic; past it the request ends with "error"
    queue_deadline_s: float | None = None  # likewise, for a request that has not been scheduled by then
    cache_salt: str | None = None  # the prefix cache shares blocks only between requests of equal salts


class Embed(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """Each input's vector; `Abort` takes the request back."""

    request_id: str
    inputs: list[list[int]]  # token ids


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]
    finished: bool = False  # True: a stop string matched, so the request counts as finished, not as aborted


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop now. The HTTP process sends it once nothing is in flight, or when the drain has timed out."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely the model found one token: natural logarithms, before penalties, bias, temperature and grammar."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens, as many as were asked for, the likeliest first


class Output(msgspec.Struct, kw_only=True, omit_defaults=True, array_like=True, gc=False):
    """What one step did for one request."""

    request_id: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_status: int = 500  # the HTTP status that `error` deserves
    num_cached_tokens: int = 0
    queue_s: float | None = None  # arrival to first scheduled; sent with the first token
    logprobs: tuple[TokenLogprobs, ...] = ()  # of `token_ids`, where asked for
    prompt_logprobs: tuple[
        TokenLogprobs, ...
    ] = ()  # of the prompt's second token and those after it; with the first token


class Stats(msgspec.Struct, kw_only=True, array_like=True):
    """The engine's gauges and counters after a step; counters are totals since start."""

    num_running: dict[str, int]  # by lane
    num_waiting: dict[str, int]  # by lane
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    preemptions: dict[str, int]  # by mode
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # and found there
    batch_size: int  # sequences in this step
    iteration_tokens: int  # tokens in this step


class StepOutputs(msgspec.Struct, kw_only=True, tag="step"):
    outputs: list[Output]
    stats: Stats


class Embedded(msgspec.Struct, kw_only=True, tag="embedded", omit_defaults=True):
    """The whole answer to one `Embed`."""

    request_id: str
    vectors: list[bytes] = []  # little-endian float32, of length 1, in the order of the inputs
    error: str | None = None
    error_status: int = 500  # the HTTP status that `error` deserves


class Ready(msgspec.Struct, kw_only=True, tag="ready"):
    """Sent once, when the engine can serve."""

    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int  # usable ones: the null block apart
    max_request_tokens: int  # min(max_model_len, num_blocks * block_size): longer requests are refused at admission
    embedding_size: int  # numbers in a vector
    max_embedding_tokens: int  # of one input: it is computed in one step
    memory_bytes: dict[str, int]  # by kind: weights, kv_cache, activations, graphs, total
    load_s: float


class Failed(msgspec.Struct, kw_only=True, tag="failed"):
    """The engine cannot start, or is about to exit: one sentence for the user."""

    error: str


ToEngine = Generate | Embed | Abort | Shutdown
FromEngine = StepOutputs | Embedded | Ready | Failed
