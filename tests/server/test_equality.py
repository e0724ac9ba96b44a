"""Whatever happens to a request in a crowd, its tokens are those it gets alone: float32, greedy and seeded."""

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from harness.engine_driver import VOCAB
from llmservice_bench.batch_scheduler import AdmitsAll
from llmservice_server.engine.block_pool import PreemptionCost
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.runtime import startup
from llmservice_server.runtime.startup import load_engine
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from llmservice_server.types.messages import GenerateRequest, SamplingParams

pytestmark = pytest.mark.slow

BLOCK_BYTES = 2 * 2 * 16 * 2 * 8 * 4  # layers, keys and values, tokens, heads, head_dim, float32
NUM_MIXES = 20

WAYS: dict[str, dict[str, Any]] = {
    "chunked": {"prefill_chunk_tokens": 7, "max_num_batched_tokens": 24, "prefix_caching": False},
    "recomputed": {"kv_cache_memory_bytes": 12 * BLOCK_BYTES, "prefix_caching": False},
    "swapped": {"kv_cache_memory_bytes": 12 * BLOCK_BYTES, "swap_space_gib": 0.001, "prefix_caching": False},
    "prefix cached": {"max_num_batched_tokens": 64},
    "all at once": {
        "kv_cache_memory_bytes": 14 * BLOCK_BYTES,
        "swap_space_gib": 0.001,
        "prefill_chunk_tokens": 11,
        "max_num_batched_tokens": 32,
    },
    "dynamic": {"scheduler": "dynamic", "max_batch_wait_s": 0.0},
    "static": {"scheduler": "static", "max_batch_wait_s": 0.0, "max_num_seqs": 3},
}
WAYS |= {f"overlapped, {way}": WAYS[way] | {"overlap": True} for way in ("recomputed", "all at once", "static")}


PENALTIES: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "min_tokens": 4, "stop_token_ids": (1,)},
    {"logit_bias": {7: 2.0, 9: -100.0}},
]
"""Computed anew from the tokens at every step, so that whatever is lost on the way back from a preemption shows."""


@pytest.fixture(scope="module")
def panelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices are of whole packed panels, as those of real models mostly are."""
    folder = tmp_path_factory.mktemp("panelled")  # a block of it takes six times as much
    spec = TinyModelSpec(layers=2, hidden_size=192, heads=6, kv_heads=3, vocab_size=VOCAB, max_position_embeddings=256)
    write_tiny_model(folder, spec)
    return folder


def engine_of(folder: Path, **settings: Any) -> Engine:
    defaults = {"max_num_seqs": 6, "max_model_len": 160}
    engine = load_engine(EngineConfig(model=folder, threads=1, **defaults | settings), clock=lambda: 100.0)
    engine.scheduler.admission = AdmitsAll(engine.pool.groups, 1)  # so that too many are admitted
    return engine


def mix(number: int) -> list[GenerateRequest]:
    """A handful of requests, some of which begin alike, some with a salt, in both lanes.

    The numbers that choose the tokens keep 9e-7 away from every border between two of them, or float32's rounding,
    which is another for other shapes of a product, would decide: with other dice one of 15,000 comes as close as 1e-9.
    """
    dice = random.Random(f"a {number}")  # noqa: S311 - traffic, not secrets
    shared = dice.choices(range(VOCAB), k=60)
    return [
        GenerateRequest(
            request_id=f"{number}-{index}",
            prompt_token_ids=shared[: dice.choice([0, 20, 48, 60])] + dice.choices(range(VOCAB), k=dice.randint(1, 40)),
            sampling=SamplingParams(
                max_tokens=dice.randint(1, 40),
                temperature=dice.choice([0.0, 0.8]),
                top_p=dice.choice([1.0, 0.9]),
                top_k=dice.choice([0, 20]),
                seed=dice.randrange(1000),
                **dice.choice(PENALTIES),
            ),
            arrival_s=100.0,
            lane=dice.choice(["interactive", "interactive", "batch"]),
            cache_salt=dice.choice([None, None, "tenant"]),
        )
        for index in range(dice.randint(3, 7))
    ]


def serve(engine: Engine, requests: list[GenerateRequest], dice: random.Random) -> dict[str, list[int]]:
    """Every request's tokens; they come at random moments."""
    tokens: dict[str, list[int]] = defaultdict(list)
    coming = list(requests)
    while coming or engine.has_work:
        if coming and (not engine.has_work or dice.random() < 0.4):
            engine.add(coming.pop(0))
        for output in engine.step().outputs:
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    return tokens


def each_alone(engine: Engine) -> dict[str, list[int]]:
    dice = random.Random(0)  # noqa: S311 - traffic, not secrets
    return {
        request.request_id: serve(engine, [request], dice)[request.request_id]
        for number in range(NUM_MIXES)
        for request in mix(number)
    }


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[int]]:
    return each_alone(engine_of(folder, prefix_caching=False))


@pytest.mark.parametrize("way", WAYS)
def test_in_any_company_a_request_gets_the_tokens_that_it_gets_alone(
    folder: Path, alone: dict[str, list[int]], way: str
) -> None:
    engine = engine_of(folder, **WAYS[way])
    if engine.swap is not None:
        engine.swap.cost = PreemptionCost(copy_block_s=0.0, compute_token_s=1.0)  # always, whatever this machine says
    dice = random.Random(way)  # noqa: S311 - traffic, not secrets
    for number in range(NUM_MIXES):
        requests = mix(number)
        assert serve(engine, requests, dice) == {request.request_id: alone[request.request_id] for request in requests}
        assert engine.stats().blocks_held == 0
    stats = engine.stats()
    assert (stats.preemptions["swap"] > 20) == (way.endswith(("swapped", "all at once")))
    assert (stats.preemptions["recompute"] > 20) == (way.endswith("recomputed"))
    assert (stats.prefix_hits > 1000) == (way.endswith(("prefix cached", "all at once")))


def test_a_request_gets_the_same_tokens_where_decodes_are_compiled_calls(
    panelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = each_alone(engine_of(panelled, prefix_caching=False))
    monkeypatch.setattr(startup, "_WORTH_COMPILING_BYTES", 0)
    engine = engine_of(panelled, **WAYS["all at once"] | {"kv_cache_memory_bytes": 14 * 6 * BLOCK_BYTES})
    assert engine.runner.decode_path is not None
    assert engine.swap is not None
    engine.swap.cost = PreemptionCost(copy_block_s=0.0, compute_token_s=1.0)
    dice = random.Random(0)  # noqa: S311 - traffic, not secrets
    for number in range(NUM_MIXES):
        requests = mix(number)
        assert serve(engine, requests, dice) == {request.request_id: alone[request.request_id] for request in requests}
    stats = engine.stats()
    assert stats.blocks_held == 0
    assert stats.preemptions["swap"] > 20
    assert stats.prefix_hits > 1000
