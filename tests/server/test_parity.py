"""Every model family against transformers, on small random checkpoints that transformers itself has saved."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM

from harness.checkpoints.families import EXPERTS, FAMILIES, OTHERS, PADDING, SMALL, Family, save
from harness.engine_driver import serve
from llmservice_bench.batch_scheduler import AdmitsAll
from llmservice_planner.model import families as planner_families
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.gpu import CPU
from llmservice_planner.sizing.overhead import adapter_term
from llmservice_planner.sizing.plan import SizingRequest, plan
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.step_input import StepInput
from llmservice_server.engine.block_pool import PreemptionCost
from llmservice_server.engine.config import EngineConfig
from llmservice_server.runtime.loader import Checkpoint, ModelLoadError
from llmservice_server.runtime.startup import load_engine, start
from llmservice_server.types.messages import GenerateRequest, ModelCode, SamplingParams

pytestmark = pytest.mark.slow

STEPS = 64
LOGIT_TOLERANCE = 1e-4  # of the row's largest logit
_Param = tuple[str, Family, ModelCode]
CASES: list[_Param] = [
    *((name, family, "own") for name, family in FAMILIES.items()),
    *((f"{name}, by transformers", family, "transformers") for name, family in (FAMILIES | OTHERS).items()),
]
GENERATED = [case for case in CASES if case[2] == "own" or case[1] in OTHERS.values()]
"""Logits alone compare a family of ours that transformers computes, but for `make test-soak`."""
_SLIDES = {"sliding_window", "attention_chunk_size"}
CROWDED = [case for case in CASES if case[2] == "own" or not _SLIDES.isdisjoint(case[1].settings)]
"""In a crowd, models of transformers differ by the windows of their blocks alone. `make test-soak` has all."""


def test_every_family_with_a_model_of_our_own_is_compared() -> None:
    served = {name for name, family in planner_families.FAMILIES.items() if family.served_architecture}
    assert {family.model_type for family in FAMILIES.values()} == served


@dataclass(frozen=True)
class Case:
    folder: Path
    reference: PreTrainedModel
    code: ModelCode

    def config(self, **settings: Any) -> EngineConfig:
        return EngineConfig(model=self.folder, implementation=self.code, threads=1, **settings)


def only(cases: Iterable[_Param]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case[1:], id=case[0]) for case in cases], indirect=True)


def always(chosen: list[_Param]) -> pytest.MarkDecorator:
    """All cases, of which those that are not `chosen` are soak tests."""
    marks = [() if case in chosen else pytest.mark.soak for case in CASES]
    params = [pytest.param(case[1:], id=case[0], marks=mark) for case, mark in zip(CASES, marks, strict=True)]
    return pytest.mark.parametrize("case", params, indirect=True)


@pytest.fixture(scope="module", autouse=True)
def _opened_once() -> Iterator[None]:
    """A checkpoint is examined once for all tests of it, none of which changes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "open", lru_cache(maxsize=2)(Checkpoint.open))
        yield


@pytest.fixture(scope="module", params=[pytest.param(case[1:], id=case[0]) for case in CASES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Made once for all tests of it, which change neither the checkpoint nor the reference."""
    family, code = request.param
    folder = tmp_path_factory.mktemp("checkpoint")
    return Case(folder, save(family, folder), code)


def _prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(SMALL["vocab_size"], (length,), generator=generator).tolist()


def _assert_greedy(model: PreTrainedModel, answers: list[tuple[list[int], list[int]]]) -> None:
    """The model, without a cache, would choose every token of each answer after its prompt and the tokens before.

    All in one batch, padded at the right, where no token of a causal model sees the padding.
    """
    rows = [torch.tensor(prompt + answer[:-1]) for prompt, answer in answers]
    with torch.inference_mode():
        chosen = model(pad_sequence(rows, batch_first=True), use_cache=False).logits.argmax(dim=-1)
    for row, (prompt, answer) in zip(chosen.tolist(), answers, strict=True):
        assert row[len(prompt) - 1 :][: len(answer)] == answer


@always(GENERATED)
def test_greedy_tokens_are_the_same_for_64_steps(case: Case) -> None:
    # Chunks, several requests in a batch and windows shorter than the prompts, all at once.
    engine = load_engine(case.config(max_num_batched_tokens=64, prefill_chunk_tokens=19))
    prompts = {f"{length} tokens": _prompt(length) for length in (1, 50, 90)}
    answers = serve(engine, [_request(name, prompt, STEPS) for name, prompt in prompts.items()])
    assert all(len(answers[name]) == STEPS for name in prompts)
    _assert_greedy(case.reference, [(prompt, answers[name]) for name, prompt in prompts.items()])
    assert engine.ready.model_code == case.code


@always(CROWDED)
def test_64_requests_in_a_crowd_get_the_tokens_of_the_model_alone(case: Case) -> None:
    dice = random.Random(7)  # noqa: S311 - traffic, not secrets
    shared = _prompt(70)
    requests = [
        _request(str(number), shared[: dice.choice([0, 30, 70])] + _prompt(dice.randint(1, 20)), dice.randint(1, 12))
        for number in range(64)
    ]
    crowded = load_engine(
        case.config(
            max_model_len=160,
            max_num_seqs=6,
            kv_cache_memory_bytes=_pool_bytes(case, 160, step_tokens=32),
            swap_space_gib=0.002,
            prefill_chunk_tokens=11,
            max_num_batched_tokens=32,
        ),
    )
    crowded.scheduler.admission = AdmitsAll(crowded.pool.groups, 1)  # so that too many are admitted
    assert crowded.swap is not None
    crowded.swap.cost = PreemptionCost(copy_block_s=0.0, compute_token_s=1.0)
    answers = serve(crowded, requests)
    for request in requests:
        assert len(answers[request.request_id]) == request.sampling.max_tokens
    _assert_greedy(case.reference, [(each.prompt_token_ids, answers[each.request_id]) for each in requests])
    stats = crowded.stats()
    assert sum(stats.preemptions.values()) > 0
    assert stats.prefix_hits > 0


def _pool_bytes(case: Case, num_tokens: int, step_tokens: int) -> int:
    """Of the null block, of those of one sequence, and of a few more: fewer would leave it alone in every step."""
    model = Checkpoint.open(case.folder, case.code).config
    shape = KVCacheShape.of(model, case.config().block_size, torch.float32)
    groups = shape.block_groups(step_tokens)
    more = 3 + 4 * sum(window is not None for window in groups.windows)
    return (1 + groups.blocks(num_tokens) + more) * shape.bytes_per_block


def _request(name: str, prompt: list[int], max_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0)


def _logits(case: Case, tokens: list[int], chunks: list[int], dtype: str) -> torch.Tensor:
    """Logits of every position, computed chunk by chunk over blocks that lie apart from each other."""
    started = start(case.config(dtype=dtype, max_model_len=256))
    table, groups = [9, 3, 4, 12, 5, 1, 20, 2, 7, 15], started.kv_cache.groups
    runner, rows, position = started.runner, [], 0
    with torch.inference_mode():
        for count in chunks:
            part = torch.tensor(tokens[position : position + count])
            tables = []
            for group in range(len(groups)):
                seen = groups.first_seen(group, position)
                tables.append([[0] * seen + [block + 20 * group for block in table[seen:]]])
            step = replace(StepInput.of([(position, count, tables[0][0])]), more_tables=tables[1:])
            attend = runner.attention.prepare(step)
            hidden = runner.model.forward(part, torch.arange(position, position + count), attend)
            rows.append(runner.model.logits(hidden))
            position += count
    assert position == len(tokens)
    return torch.cat(rows)


def test_the_planner_predicts_weights_blocks_and_slots(case: Case) -> None:
    shape = ModelShape.from_folder(case.folder)
    request = SizingRequest(shape=shape, device=CPU(1 << 30), max_model_len=256, dtype="float32")
    predicted = plan(request)
    experts = shape.adapted_expert_features > 0 and _has_experts_of_ours(case)
    settings: dict[str, Any] = {"max_loras": 1, "max_lora_rank": 8, "lora_experts": experts, "max_model_len": 256}
    started = start(case.config(dtype="float32", kv_cache_memory_bytes=predicted.kv_pool_bytes, **settings))
    slots = adapter_term(shape, "float32", 1, 8, experts=experts, on_cpu=True)
    assert started.memory_bytes["adapters"] == slots.total_bytes
    assert started.memory_bytes["weights"] == pytest.approx(predicted.weights_bytes, rel=0.01)
    assert started.kv_cache.num_blocks == pytest.approx(predicted.num_blocks, rel=0.03)
    assert started.kv_cache.groups.windows == shape.block_groups(16, 1).windows


def _errors(ours: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (ours - reference).abs().amax(-1) / reference.abs().amax(-1)


def _has_experts_of_ours(case: Case) -> bool:
    model = Checkpoint.open(case.folder, case.code).load(torch.float32, torch.device("cpu"), "dense")
    return any(model.mixtures())


def test_logits_are_the_same_in_chunks_and_over_scattered_blocks(case: Case) -> None:
    tokens = _prompt(104)
    with torch.inference_mode():
        expected = case.reference(torch.tensor([tokens])).logits[0]
    # Single tokens before and behind the end of a block, of Llama 4's chunk, and where a window leaves a block.
    ours = _logits(case, tokens, [40, 1, 1, 33, 20, 1, 1, 5, 1, 1], "float32")
    assert _errors(ours, expected).max() < LOGIT_TOLERANCE


OTHER_NAMES = {"n_embd": 48, "n_layer": 3, "n_head": 6, "d_model": 48, "n_layers": 3, "n_heads": 6, "n_positions": 512}
OTHER_EXPERTS = {
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_topk": 2,
    "n_shared_experts": 1,
}
NOT_LISTED = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {family.model_type for family in (FAMILIES | OTHERS).values()}
MOST_PARAMETERS = 10_000_000
NOT_PLANNED = {"ctrl", "moshi"}  # tables of positions that are in no file, and an audio model beside it


@pytest.mark.soak
@pytest.mark.parametrize("model_type", sorted(NOT_LISTED))
def test_every_other_decoder_of_transformers_is_computed_or_refused(model_type: str, tmp_path: Path) -> None:
    try:
        reference = save(_small(model_type), tmp_path)
    except Exception as error:
        pytest.skip(f"transformers makes none with these settings: {error}")
    case = Case(tmp_path, reference, "auto")
    try:
        start(case.config())
    except ModelLoadError as error:
        assert "cannot be served" in str(error)  # noqa: PT017 - both ways are right
        return
    test_logits_are_the_same_in_chunks_and_over_scattered_blocks(case)
    if model_type not in NOT_PLANNED:
        test_the_planner_predicts_weights_blocks_and_slots(case)


def _small(model_type: str) -> Family:
    """Settings of those names that its configuration has."""
    default = AutoConfig.for_model(model_type)
    keys = default.to_dict()  # layers may differ in some of them, which transformers then refuses to name
    wanted = {**SMALL, **OTHER_NAMES, **EXPERTS, **OTHER_EXPERTS, **PADDING, "head_dim": 16}
    wanted |= {"hidden_size_per_layer_input": 0}  # Gemma 4 without them
    settings = {key: value for key, value in wanted.items() if key in keys or hasattr(default, key)}
    if kinds := keys.get("layer_types"):
        settings["layer_types"] = kinds[: SMALL["num_hidden_layers"]]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    if model.num_parameters() > MOST_PARAMETERS:
        raise ValueError(f"it has {model.num_parameters()} parameters")
    return Family(model_type, settings, rewrite={key: None for key in SMALL if key not in settings})


@only(case for case in CASES if case[2] == "own")
def test_bfloat16_is_as_close_to_float32_as_transformers_own(case: Case) -> None:
    check_half_precision(case, "bfloat16")


def test_so_is_float16(tmp_path: Path) -> None:
    family = FAMILIES["qwen3, windows by layer, tied and sharded"]
    check_half_precision(Case(tmp_path, save(family, tmp_path), "own"), "float16")


def check_half_precision(case: Case, dtype: str) -> None:
    tokens = _prompt(60)
    with torch.inference_mode():
        exact = case.reference(torch.tensor([tokens])).logits[0]
        half = AutoModelForCausalLM.from_pretrained(case.folder, dtype=getattr(torch, dtype))  # RoPE stays in float32
        theirs = half(torch.tensor([tokens])).logits[0].float()
    ours = _logits(case, tokens, [30, 20, *[1] * 10], dtype)
    assert ours.dtype == torch.float32
    # Where two experts are almost equally good, rounding chooses between them: a few tokens then differ much.
    has_experts = hasattr(case.reference.config, "num_experts_per_tok")
    of_all = torch.Tensor.median if has_experts else torch.Tensor.max
    assert of_all(_errors(ours, exact)) < 2 * of_all(_errors(theirs, exact))
