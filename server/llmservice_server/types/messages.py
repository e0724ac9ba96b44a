"""The messages between the HTTP process and the engine process: msgspec structs, encoded as MessagePack over zmq."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
Fallback = Literal["attention", "top_k_top_p", "decode_graphs", "quantized_product", "grouped_product"]
"""What runs without our kernels where they fail their check."""
Task = Literal["generate", "embed", "score"]
"""What a model does: a decoder generates (and embeds), an encoder embeds, a cross-encoder scores pairs of texts."""
AdapterState = Literal["loaded", "evicted"]
"""Of a LoRA adapter: on the device, or read again from its folder when a request names it."""
ModelCode = Literal["own", "transformers"]
"""Whose code computes the model: ours, or transformers' around our attention, matrices and cache."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the answers to one prompt are sampled, with the names and meanings of the HTTP API and of vLLM.

    `n`, `stop`, `include_stop_str_in_output` and `skip_special_tokens` are applied by the process that has the text;
    the engine receives their defaults. Raises ValueError for an `n` below 1 and an empty stop string.
    """

    max_tokens: int = 16
    n: int = 1  # answers to each prompt
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens that are sampled; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that an answer never contains in this order
    stop: str | Sequence[str] = ()  # strings that end the answer
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True  # in the text
    stop_token_ids: tuple[int, ...] = ()  # the stop token is never returned
    min_tokens: int = 0  # no stop token or stop string ends a shorter answer
    ignore_eos: bool = False
    logprobs: int | None = None  # number of top tokens returned with each token; None: no log-probabilities
    prompt_logprobs: int | None = None  # likewise for the tokens of the prompt
    grammar: str | None = None  # in llguidance's JSON; the answer conforms to it

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}, expected at least 1")
        if not all(self.stop_strings):
            raise ValueError("stop holds an empty string, which would match at once: leave it out")

    @property
    def stop_strings(self) -> Sequence[str]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    def for_engine(self, choice: int, eos_token_ids: frozenset[int]) -> SamplingParams:
        """Those of answer number `choice`: each has its own seed, and ends at `eos_token_ids` unless `ignore_eos`."""
        eos = frozenset[int]() if self.ignore_eos else eos_token_ids
        return msgspec.structs.replace(
            self,
            n=1,
            stop=(),
            include_stop_str_in_output=False,
            skip_special_tokens=True,
            max_tokens=self.max_tokens or 1,  # reading a prompt samples a token, which `OutputProcessor` then drops
            seed=None if self.seed is None else (self.seed + choice) % 2**63,
            stop_token_ids=tuple(sorted(eos.union(self.stop_token_ids))),
        )

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def is_plain(self) -> bool:
        """Whether the model's logits are sampled unchanged, and no log-probabilities are returned."""
        changed = self.has_penalties or self.logit_bias or self.min_tokens or self.grammar is not None
        masked = self.allowed_token_ids or self.bad_words
        return not changed and not masked and self.logprobs is None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate", omit_defaults=True):
    """One answer to one prompt; `OutputProcessor` makes `sampling.n` of them from the request for a prompt."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_s: float  # time.monotonic() of the HTTP process; both processes share the machine's clock
    lane: str = "interactive"
    priority: int = 0  # among the client's in the lane; the smaller is served first
    client: str | None = None  # a name; clients get equal shares of what their lane serves
    deadline_s: float | None = None  # monotonic; past it the request ends with "error"
    queue_deadline_s: float | None = None  # likewise, for a request that has not been scheduled by then
    cache_salt: str | None = None  # the prefix cache shares blocks only between requests with equal salts
    predicted_tokens: float | None = None  # of the answer; None: as many as `max_tokens`
    adapter: str | None = None  # the name of a LoRA adapter; None: the model itself
    adapter_version: str = ""  # the one that `block_hashes` are of
    block_hashes: bytes = b""  # of the prompt's full blocks, where they are known: the engine need not compute them
    end_token_ids: tuple[int, ...] = ()  # that end an answer which conforms to the grammar


class Embed(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """A request for the vector of each input, of a cross-encoder for its logits; `Abort` cancels it."""

    request_id: str
    inputs: list[list[int]]  # token ids
    type_ids: list[list[int]] = []  # of each token: which text of a pair it belongs to; empty: the first
    client: str | None = None  # name of the API key: who shares the model equally with others


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="load_adapter"):
    """Load a LoRA adapter, or another version of one; `AdapterReport` answers."""

    request_id: str
    name: str
    folder: str
    pinned: bool = False  # never evicted


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """Forget an adapter; requests that compute with it do so to their end. `AdapterReport` answers."""

    request_id: str
    name: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]
    finished: bool = False  # True: a stop string matched, so the request counts as finished, not as aborted


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the process now. Sent once nothing is in flight, or when the drain has timed out."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities, before penalties, bias, temperature and grammar."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the top tokens, as many as requested, in descending order


class Output(msgspec.Struct, kw_only=True, omit_defaults=True, array_like=True, gc=False):
    """The outcome of one step for one request."""

    request_id: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_status: int = 500  # HTTP status for `error`
    num_cached_tokens: int = 0
    queue_s: float | None = None  # arrival to first scheduled; sent with the first token
    logprobs: tuple[TokenLogprobs, ...] = ()  # of `token_ids`, where requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # from the prompt's second token on; sent with the first token


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that requests may name."""

    name: str
    version: str  # a hash of its files
    state: AdapterState
    folder: str
    pinned: bool


class AdapterReport(msgspec.Struct, frozen=True, kw_only=True):
    """All adapters, after a change of one; where `request_id` is set, the answer to that message."""

    adapters: list[AdapterInfo]
    request_id: str | None = None
    error: str | None = None
    error_status: int = 400  # HTTP status for `error`


class StepTime(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How long a step took, and what it computed: the planner's `StepBatch`.

    `seconds` are those from the result before to its own, where the engine has computed ever since; else from the
    step's begin. So they are what a token takes: planning, messages and copies included, as far as no other step hides
    them. Steps that failed, or during which embeddings were computed, are not reported.
    """

    seconds: float
    num_seqs: int  # sequences that decode
    context_tokens: int  # whose keys and values they read, all together
    prompt_tokens: int = 0
    prompt_chunks: int = 0
    attention_pairs: int = 0  # of each token of a chunk with each token up to it


class Stats(msgspec.Struct, kw_only=True, array_like=True):
    """The engine's gauges and counters after a step; counters are totals since start."""

    num_running: dict[str, int]  # by lane
    num_waiting: dict[str, int]  # by lane
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    preemptions: dict[str, int]  # by mode
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # prompt tokens found there
    batch_size: int  # sequences in this step
    iteration_tokens: int  # tokens in this step
    num_admissible: int  # requests like those before that the KV cache holds at once, at most `max_num_seqs`
    step: StepTime | None = None  # that has ended since the message before


class StepOutputs(msgspec.Struct, kw_only=True, tag="step"):
    outputs: list[Output]
    stats: Stats
    adapters: list[AdapterReport] = []


class Embedded(msgspec.Struct, kw_only=True, tag="embedded", omit_defaults=True):
    """The answer to one `Embed`."""

    request_id: str
    vectors: list[bytes] = []  # little-endian float32 in the order of the inputs; of a cross-encoder, its logit
    error: str | None = None
    error_status: int = 500  # HTTP status for `error`


class Ready(msgspec.Struct, kw_only=True, tag="ready"):
    """Sent once, when the engine can serve."""

    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int  # without the null block
    block_groups: int = 1  # of layers: a sequence takes blocks for each of them
    max_request_tokens: int  # of prompt and answer, as far as the blocks go
    embedding_size: int  # numbers in a vector
    max_embedding_tokens: int  # of one input: it is computed in one step
    prefix_caching: bool = True
    memory_bytes: dict[str, int]  # by kind: weights, kv_cache, activations, graphs, total
    load_s: float  # from the engine's start, without compiling
    compile_s: float = 0.0
    kernels_compiled: int = 0
    kernels_loaded: int = 0  # from the cache of compiled kernels
    task: Task = "generate"
    max_loras: int = 0  # adapters on the device at once
    architecture: str
    model_code: ModelCode
    fallbacks: dict[Fallback, str] = {}  # what runs without our kernels because they failed their check, and why

    @property
    def is_decoder(self) -> bool:
        """Some of them only embed; an encoder has no KV cache."""
        return self.num_blocks > 0


class Failed(msgspec.Struct, kw_only=True, tag="failed"):
    """The engine cannot start, or is about to exit: one sentence for the user."""

    error: str


ToEngine = GenerateRequest | Embed | Abort | LoadAdapter | UnloadAdapter | Shutdown
FromEngine = StepOutputs | Embedded | Ready | Failed
