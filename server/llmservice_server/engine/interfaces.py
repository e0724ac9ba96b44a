"""The interfaces of the engine: the plan of a step, the schedulers that make plans, the runner that computes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from llmservice_planner.model.block_groups import BlockGroups
from llmservice_server.engine.block_pool import SwapSpace
from llmservice_server.engine.request import Request
from llmservice_server.types.messages import Embed, Embedded, Fallback, ModelCode, Task, TokenLogprobs


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step: the tokens [start, start + num_tokens) of its `token_ids`.

    There is one for each request and step: a struct that the garbage collector does not track is created in a fifth of
    the time of a named tuple.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool  # the share reaches the last known token, so the step yields the next one


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block's keys and values go from one place to another; one of the two is in the swap space."""

    source: int
    target: int


@dataclass(slots=True)
class Plan:
    """One step: first the copies `swap_out`, then `swap_in`; then the runner computes `scheduled` in this order."""

    scheduled: list[Scheduled] = field(default_factory=list)
    num_decodes: int = 0
    """Of `scheduled`, those that are known to compute one token; a scheduler need not count them."""
    preempted: list[Request] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    registered: dict[Request, list[int]] = field(default_factory=dict)
    """Blocks that the step fills and later shares of it may read already, by the request that computes them."""

    @property
    def num_tokens(self) -> int:
        return sum([share.num_tokens for share in self.scheduled])


class Scheduler(Protocol):
    """Decides which requests compute which tokens in a step, and owns the queues. Deterministic; time is passed in."""

    @property
    def running(self) -> Sequence[Request]: ...

    @property
    def num_waiting(self) -> Mapping[str, int]:
        """Requests that wait, by lane."""

    @property
    def num_preemptions(self) -> Mapping[str, int]:
        """Since start, by mode."""

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache since start."""

    @property
    def prefix_hits(self) -> int:
        """Prompt tokens found there."""

    def add(self, request: Request) -> None: ...

    def finish(self, request: Request) -> None:
        """Remove a request from its queue, whatever ended it, and free its blocks. Calling it again has no effect."""

    def schedule(self, now: float) -> Plan:
        """Plan the next step and take the blocks it needs. `num_computed_tokens` advances here, not after the step."""

    @property
    def num_admissible(self) -> int:
        """Requests like those before that can run at once."""

    def commit(self, plan: Plan, failed: Collection[Request] = ()) -> Collection[Request]:
        """The step is computed, or will be before anything that is planned from now on; but for the `failed`.

        Every token that it computes is known by now. Returns the requests that read what a failed one should have
        computed: their results are void, and they are computed again.
        """

    def tokens_left(self, plan: Plan) -> int:
        """How many prompt tokens a step with this plan leaves to work of the batch lane that no scheduler sees."""

    def wait_s(self, now: float) -> float:
        """Seconds until there is work, unless a request arrives; 0 where a step can be computed."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has computed. `token_ids` and `logprobs` have an entry for each of `requests`."""

    requests: Sequence[Request] = ()  # those that were due a token
    token_ids: Sequence[int] = ()  # -1: the request's logits are not finite
    logprobs: Sequence[TokenLogprobs | None] = ()
    prompt_logprobs: Mapping[Request, list[TokenLogprobs]] = field(default_factory=dict)
    failed: Mapping[Request, str] = field(default_factory=dict)  # by the host, with the message for the client


class StepInFlight(Protocol):
    """A step on the device: launched, then sampled, then read. The host waits in `wait` only."""

    @property
    def requests(self) -> Sequence[Request]:
        """Those that are due a token of it."""

    def sample(self, ended: Collection[Request] = ()) -> None:
        """Sample on the device the tokens that are due, except for requests that have ended since the launch.

        The host must have read the step before.
        """

    def wait(self) -> StepResult:
        """Raises what the device raises, which is then lost."""


S = TypeVar("S", bound=StepInFlight)


class Runner(Protocol[S]):
    """Computes plans. Work is done in the order in which it was launched."""

    def swap(self, plan: Plan) -> None:
        """Do the plan's copies: to be called once, before the plan is launched or executed."""

    def launch(self, plan: Plan, after: S | None = None) -> S:
        """Run the model on the plan's tokens; some of them are those that the step `after` samples."""

    def execute(self, plan: Plan) -> StepResult:
        """`launch`, `sample` and `wait` in one."""

    def recover(self) -> None:
        """Make the device usable after an exception. Raises RuntimeError where it is lost."""


class Embedder(Protocol):
    """Embedding requests, computed in batches between the steps."""

    @property
    def size(self) -> int:
        """Numbers in a vector."""

    @property
    def max_tokens(self) -> int:
        """Of one input."""

    def add(self, message: Embed, now: float) -> Embedded | None:
        """Queue a request; returns the answer to one that is refused."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; unknown ids are ignored."""

    def due_s(self) -> float | None:
        """When `step` has something to do (monotonic); None where nothing waits."""

    def step(self, now: float, max_tokens: int | None = None, step_s: float | None = None) -> list[Embedded]:
        """Compute what `max_tokens` (None: any number) allow beside a step of `step_s` seconds."""


class AdapterWeights(Protocol):
    """An adapter that has been read and fits the model."""

    @property
    def version(self) -> str:
        """A hash of its files."""


W = TypeVar("W", bound=AdapterWeights)


class AdapterStore(Protocol[W]):
    """The device's slots for LoRA adapters."""

    @property
    def num_slots(self) -> int: ...

    def read(self, folder: str) -> Future[W]:
        """Read an adapter on another thread. Results in the `AdapterError` that refuses it."""

    def put(self, slot: int, weights: W) -> None:
        """Copy it into a slot, which no step in flight writes to. To be called between steps."""


class GrammarCompiler(Protocol):
    def compile(self, grammar: str, end_token_ids: Sequence[int]) -> Future[Any]:
        """Results in an object whose `start()` returns a `Grammar`, or in the `GrammarError` that refuses it."""


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """What start-up allocates, and the longest request that fits into it."""

    num_blocks: int  # the null block included
    max_model_len: int
    groups: BlockGroups

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1


@dataclass(frozen=True, slots=True)
class Started:
    """A loaded model, ready to compute steps."""

    runner: Runner[Any]
    embedder: Embedder
    grammars: GrammarCompiler
    kv_cache: KVCachePlan
    max_num_seqs: int
    memory_bytes: dict[str, int]  # by kind: weights, kv_cache, activations, graphs, total
    vocab_size: int
    eos_token_ids: frozenset[int]
    architecture: str
    model_code: ModelCode
    task: Task = "generate"
    swap: SwapSpace | None = None
    adapters: AdapterStore[Any] | None = None  # None: there are no slots for adapters
    overlaps: bool = False  # the next step is planned while one is computed, where the settings leave it open
    prefill_tokens: int | None = None  # of a step, beyond which the device computes no faster; None: no such bound
    load_s: float = 0.0  # without compiling
    compile_s: float = 0.0
    kernels_compiled: int = 0
    kernels_loaded: int = 0  # from the cache of compiled kernels
    fallbacks: dict[Fallback, str] = field(default_factory=dict)  # what runs without our kernels, and why
    phases_s: dict[str, float] = field(default_factory=dict)  # where the time of starting went, seconds by name
