"""What the engine asks of the half that computes: the runner, embeddings, grammars. Implemented in `runtime/`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from llmservice_server.engine.block_pool import SwapSpace
from llmservice_server.engine.plan import Plan
from llmservice_server.engine.request import Request
from llmservice_server.types.messages import Embed, Embedded, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has computed. `token_ids` and `logprobs` have an entry for each of `requests`."""

    requests: Sequence[Request] = ()  # those that were due a token
    token_ids: Sequence[int] = ()  # -1: the request's logits are not finite
    logprobs: Sequence[TokenLogprobs | None] = ()
    prompt_logprobs: Mapping[Request, list[TokenLogprobs]] = field(default_factory=dict)
    failed: Mapping[Request, str] = field(default_factory=dict)  # by the host, with a sentence for the client


class StepInFlight(Protocol):
    """A step on the device: launched, then sampled, then read. The host waits in `wait` only."""

    @property
    def requests(self) -> Sequence[Request]:
        """Those that are due a token of it."""

    def sample(self, ended: Collection[Request] = ()) -> None:
        """Have the device draw the tokens that are due, except for requests that have ended since the launch.

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
        """Have the device run the model on the plan's tokens; some of them are what the step `after` draws."""

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


class GrammarCompiler(Protocol):
    def compile(self, grammar: str) -> Future[Any]:
        """Results in an object whose `start()` returns a `Grammar`, or in the `GrammarError` that refuses it."""


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """What start-up allocates, and the longest request that is promised with it."""

    num_blocks: int  # the null block included
    max_model_len: int

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
    swap: SwapSpace | None = None
    overlaps: bool = False  # the next step is planned while one is computed, where the settings leave it open
    prefill_tokens: int | None = None  # of a step, beyond which the device computes no faster; None: no such bound
    load_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)  # where the time of starting went, seconds by name
