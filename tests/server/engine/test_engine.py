"""The engine on a tiny model: what goes in comes out, whatever happens in between."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.engine_driver import VOCAB, EngineDriver, prompt_of
from llmservice_bench.batch_scheduler import AdmitsAll
from llmservice_planner.sizing.overhead import PROCESS_BYTES
from llmservice_server.engine.config import EngineConfig
from llmservice_server.runtime.startup import load_engine
from llmservice_server.types.errors import ConfigError, OutOfMemoryError

BLOCK_BYTES = 2 * 2 * 16 * 2 * 8 * 4  # layers, keys and values, tokens, heads, head_dim, float32


class Driver(EngineDriver):
    @classmethod
    def of(cls, folder: Path, **settings: Any) -> Driver:
        driver: Driver
        driver = cls(load_engine(EngineConfig(model=folder, threads=1, **settings), clock=lambda: driver.now))
        return driver


@pytest.mark.slow
def test_after_2000_requests_with_a_tenth_cancelled_every_block_is_free_and_the_engine_answers(folder: Path) -> None:
    driver = Driver.of(folder, max_num_seqs=32, kv_cache_memory_bytes=90 * BLOCK_BYTES)
    driver.engine.scheduler.admission = AdmitsAll(driver.engine.pool.groups, 1)  # so that too many are admitted
    expected = driver.answer("before", prompt_of(20))
    dice = random.Random(7)  # noqa: S311 - traffic, not secrets
    cancelled = set()
    for number in range(2000):
        request_id = f"r{number}"
        prompt = prompt_of(min(120, int(dice.lognormvariate(2.5, 1))) + 1, number)
        driver.add(request_id, prompt, max_tokens=dice.randint(1, 24), temperature=dice.choice([0.0, 1.0]), top_p=0.9)
        if number % 4 == 0:
            driver.step()
        if dice.random() < 0.1:
            victim = f"r{dice.randrange(max(0, number - 100), number + 1)}"
            if victim not in driver.last:
                driver.engine.abort([victim])
                cancelled.add(victim)
    driver.run()
    assert driver.engine.stats().preemptions["recompute"] > 0
    reasons = [output.finish_reason for request_id, output in driver.last.items() if request_id != "before"]
    assert len(reasons) == 2000
    assert reasons.count("abort") == len(cancelled) > 100
    assert reasons.count("length") == 2000 - len(cancelled)
    assert driver.answer("after", prompt_of(20)) == expected


def test_preempted_and_chunked_requests_yield_the_same_tokens_as_undisturbed_ones(folder: Path) -> None:
    prompts = {f"r{length}": prompt_of(length) for length in (3, 17, 33, 60, 90, 100)}
    alone = Driver.of(folder)
    undisturbed = {name: alone.answer(name, prompt, max_tokens=60) for name, prompt in prompts.items()}
    crowded = Driver.of(
        folder,
        max_model_len=160,
        max_num_batched_tokens=40,
        max_num_seqs=6,
        prefill_chunk_tokens=9,
        kv_cache_memory_bytes=17 * BLOCK_BYTES,
        expected_tokens=1,  # so that too many are admitted
    )
    for name, prompt in prompts.items():
        crowded.add(name, prompt, max_tokens=60)
    crowded.run()
    assert crowded.engine.stats().preemptions["recompute"] > 0
    assert crowded.tokens == undisturbed


def test_a_seeded_request_gets_the_same_tokens_alone_in_a_crowd_and_after_preemption(folder: Path) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 1234, "max_tokens": 60}
    alone = Driver.of(folder).answer("seeded", prompt_of(40), **sampling)
    crowded = Driver.of(
        folder,
        max_model_len=160,
        max_num_batched_tokens=48,
        prefill_chunk_tokens=16,
        max_num_seqs=5,
        kv_cache_memory_bytes=13 * BLOCK_BYTES,
        expected_tokens=1,
    )
    for number in range(3):
        crowded.add(f"r{number}", prompt_of(30, number), temperature=1.0, max_tokens=50)
    assert crowded.answer("seeded", prompt_of(40), **sampling) == alone
    assert crowded.engine.stats().preemptions["recompute"] > 0


def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them(folder: Path) -> None:
    def answers(seed: int) -> list[list[int]]:
        driver = Driver.of(folder, seed=seed)
        return [driver.answer(f"r{number}", prompt_of(8), temperature=1.0) for number in range(3)]

    first = answers(seed=1)
    assert first[0] != first[1] != first[2]
    assert answers(seed=1) == first
    assert answers(seed=2) != first


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(folder: Path) -> None:
    whole = Driver.of(folder).answer("whole", prompt_of(9), max_tokens=12)
    driver = Driver.of(folder)
    place = next(place for place in range(1, 12) if whole[place] not in whole[:place])
    assert driver.answer("stopped", prompt_of(9), max_tokens=12, stop_token_ids=(whole[place],)) == whole[:place]
    assert driver.last["stopped"].finish_reason == "stop"


def test_ignore_eos_passes_over_the_models_own_stop_tokens_only(folder: Path, tmp_path: Path) -> None:
    whole = Driver.of(folder).answer("whole", prompt_of(9), max_tokens=12)
    eos, other = whole[2], next(token for token in whole[3:] if token not in whole[:3])
    for source in folder.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{eos}]}}')
    driver = Driver.of(tmp_path)
    stop = {"stop_token_ids": (eos, other), "max_tokens": 12}
    assert eos not in driver.answer("obedient", prompt_of(9), **stop)
    assert driver.answer("ignoring", prompt_of(9), ignore_eos=True, **stop) == whole[: whole.index(other)]


def test_before_min_tokens_no_stop_token_ends_the_answer(folder: Path) -> None:
    whole = Driver.of(folder).answer("whole", prompt_of(9), max_tokens=12)
    place = next(place for place in range(1, 12) if whole[place] not in whole[:place])
    driver = Driver.of(folder)
    sampling = {"max_tokens": 12, "stop_token_ids": (whole[place],)}
    answer = driver.answer("longer", prompt_of(9), min_tokens=place + 1, **sampling)
    assert len(answer) > place
    assert answer[:place] == whole[:place]
    assert answer[place] != whole[place]


def test_the_probabilities_of_prompt_and_answer_are_those_of_transformers(folder: Path) -> None:
    """In chunks, beside others and with preemption: a step reports what it computes, once."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = {f"r{length}": prompt_of(length) for length in (1, 30, 70)}
    driver = Driver.of(
        folder,
        max_model_len=160,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        prefill_chunk_tokens=11,
        kv_cache_memory_bytes=11 * BLOCK_BYTES,
        expected_tokens=1,
    )
    for name, prompt in prompts.items():
        driver.add(name, prompt, temperature=1.0, max_tokens=40, logprobs=3, prompt_logprobs=2)
    driver.run()
    assert driver.engine.stats().preemptions["recompute"] > 0
    for name, prompt in prompts.items():
        tokens = prompt + driver.tokens[name]
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
        assert [entry.token_id for entry in driver.reported[name]] == tokens[1:]
        for place, entry in enumerate(driver.reported[name]):
            assert entry.logprob == pytest.approx(float(expected[place, tokens[place + 1]]), abs=2e-4)
            top = expected[place].topk(2 if place < len(prompt) - 1 else 3).values.tolist()
            assert [value for _, value in entry.top] == pytest.approx(top, abs=2e-4)


def test_penalties_hold_over_a_preemption(folder: Path) -> None:
    sampling = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "max_tokens": 60}
    alone = Driver.of(folder).answer("penalized", prompt_of(40), **sampling)
    assert alone != Driver.of(folder).answer("plain", prompt_of(40), max_tokens=60)
    crowded = Driver.of(
        folder, max_model_len=160, max_num_seqs=5, kv_cache_memory_bytes=13 * BLOCK_BYTES, expected_tokens=1
    )
    for number in range(3):
        crowded.add(f"r{number}", prompt_of(30, number), temperature=1.0, max_tokens=50)
    assert crowded.answer("penalized", prompt_of(40), **sampling) == alone
    assert crowded.engine.stats().preemptions["recompute"] > 0


def test_the_first_token_reports_how_long_the_request_was_queued(folder: Path) -> None:
    driver = Driver.of(folder)
    driver.add("r", prompt_of(5))
    driver.now += 2.5
    [output] = driver.step()
    assert output.queue_s == pytest.approx(2.5)
    [output] = driver.step()
    assert output.queue_s is None


def test_an_aborted_request_frees_its_blocks_at_once_and_is_reported_with_the_next_step(folder: Path) -> None:
    driver = Driver.of(folder, max_num_seqs=1)
    driver.add("running", prompt_of(40))
    driver.add("waiting", prompt_of(5))
    driver.add("matched", prompt_of(5))
    driver.step()
    assert driver.engine.stats().blocks_held > 0
    driver.engine.abort(["running", "waiting", "never seen"])
    driver.engine.abort(["matched"], finished=True)
    assert driver.engine.stats().blocks_held == 0
    driver.run()
    assert {name: output.finish_reason for name, output in driver.last.items()} == {
        "running": "abort",
        "waiting": "abort",
        "matched": "stop",
    }


def test_a_request_past_its_deadline_ends_with_504_whether_it_ran_or_waited(folder: Path) -> None:
    driver = Driver.of(folder, max_num_seqs=1)
    driver.add("running", prompt_of(4), deadline_s=110.0)
    driver.add("waiting", prompt_of(4), deadline_s=110.0)
    driver.add("patient", prompt_of(4), deadline_s=900.0)
    driver.step()
    driver.now = 110.0
    driver.step()
    assert driver.last["running"].error == "the request's deadline passed after 1 tokens"
    assert driver.last["waiting"].error == "the request's deadline passed while it waited"
    assert [driver.last[name].error_status for name in ("running", "waiting")] == [504, 504]
    driver.run()
    assert driver.last["patient"].finish_reason == "length"


def test_what_can_never_be_served_is_refused_with_the_next_step_and_affects_no_other(folder: Path) -> None:
    driver = Driver.of(folder)
    driver.add("good", prompt_of(4))
    driver.add("empty", [])
    driver.add("too long", prompt_of(250))
    driver.add("alien token", [3, VOCAB])
    driver.add("good", prompt_of(4))
    outputs = {(output.request_id, output.error_status): output.error for output in driver.engine.step().outputs}
    assert outputs["empty", 400] == "the prompt has no tokens, expected at least one"
    assert "250 prompt tokens and max_tokens 16 make 266, expected at most 256" in str(outputs["too long", 400])
    assert "expected 0 to 511" in str(outputs["alien token", 400])
    assert "expected a new id" in str(outputs["good", 400])
    assert outputs["good", 500] is None  # the first one's first token
    driver.run()
    assert driver.last["good"].finish_reason == "length"


def test_logits_that_are_not_finite_fail_only_the_request_that_has_them(folder: Path, tmp_path: Path) -> None:
    for source in folder.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    driver = Driver.of(tmp_path)
    poison = 5
    driver.engine.runner.model.embed_tokens[poison] = torch.nan  # as a checkpoint with one bad row would
    healthy = [token for token in prompt_of(12) if token != poison]
    driver.add("poisoned", [1, poison, 2])
    driver.add("healthy", healthy)
    driver.run()
    assert driver.last["poisoned"].finish_reason == "error"
    assert "not finite" in str(driver.last["poisoned"].error)
    assert driver.tokens["healthy"] == Driver.of(folder).answer("healthy", healthy)


def test_a_forward_that_fails_fails_only_the_request_that_causes_it(folder: Path) -> None:
    driver = Driver.of(folder)
    expected = {name: driver.answer(name, prompt_of(20, seed), max_tokens=8) for seed, name in enumerate("abcd")}
    driver = Driver.of(folder)
    for seed, name in enumerate("abcd"):
        driver.add(name, prompt_of(20, seed), max_tokens=8)
    driver.step()
    broken = driver.engine.scheduler.running[2]
    broken.token_ids[-1] = VOCAB + 7  # no such row in the embedding: the kernel refuses it
    driver.run()
    assert driver.last["c"].finish_reason == "error"
    assert "the engine failed to compute this request (IndexError)" in str(driver.last["c"].error)
    assert {name: driver.tokens[name] for name in "abd"} == {name: expected[name] for name in "abd"}


def test_cached_prefixes_are_reported_with_the_first_token_and_counted_in_tokens(folder: Path) -> None:
    driver = Driver.of(folder)
    driver.answer("first", prompt_of(40))
    driver.add("second", prompt_of(40))
    [output] = driver.step()
    assert output.num_cached_tokens == 32
    stats = driver.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (80, 32)
    driver.run()
    assert driver.tokens["second"] == driver.tokens["first"]


def test_without_prefix_caching_nothing_is_looked_up(folder: Path) -> None:
    driver = Driver.of(folder, prefix_caching=False)
    assert driver.answer("first", prompt_of(40)) == driver.answer("second", prompt_of(40))
    stats = driver.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.blocks_cached) == (0, 0, 0)


def test_a_request_that_waits_longer_than_it_may_ends_with_504_but_not_once_it_runs(folder: Path) -> None:
    driver = Driver.of(folder, max_num_seqs=1)
    driver.add("running", prompt_of(4), queue_deadline_s=105.0)
    driver.add("waiting", prompt_of(4), queue_deadline_s=105.0)
    driver.step()
    driver.now = 106.5
    driver.run()
    assert driver.last["running"].finish_reason == "length"
    assert driver.last["waiting"].error == "the request waited 6.5 s, longer than it may: try again later"
    assert driver.last["waiting"].error_status == 504


def test_an_unknown_lane_is_refused(folder: Path) -> None:
    driver = Driver.of(folder)
    driver.add("lost", prompt_of(4), lane="fast")
    driver.step()
    assert driver.last["lost"].error == "lane is 'fast', expected one of interactive, batch"


def test_a_dynamic_batch_waits_for_company_but_not_beyond_a_deadline(folder: Path) -> None:
    driver = Driver.of(folder, scheduler="dynamic", max_batch_wait_s=2.0, max_num_seqs=2)
    driver.add("patient", prompt_of(4))
    assert driver.engine.wait_s() == pytest.approx(2.0)
    assert driver.step() == []
    driver.add("hurried", prompt_of(4), deadline_s=100.5)
    assert driver.engine.wait_s() == 0
    driver.engine.abort(["patient"])
    driver.step()
    assert driver.engine.wait_s() == pytest.approx(0.5)


def test_swap_space_beyond_the_memory_is_refused_with_the_numbers(folder: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"--swap-space-gib asks for 1048576\.00 GiB of CPU memory, .* lower it"):
        Driver.of(folder, swap_space_gib=2.0**20)


def test_a_pool_too_small_for_an_explicit_length_is_refused_with_the_longest_that_fits(folder: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"max_model_len 200 needs .* lower it to 64 or"):
        Driver.of(folder, max_model_len=200, kv_cache_memory_bytes=5 * BLOCK_BYTES)


def test_a_pool_too_small_for_the_models_context_lowers_it_and_logs_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver.of(folder, kv_cache_memory_bytes=5 * BLOCK_BYTES)
    assert driver.engine.ready.max_model_len == driver.engine.ready.max_request_tokens == 64
    assert "max_model_len lowered from the model's 256 to 64 tokens" in caplog.text
    assert len(driver.answer("just fits", prompt_of(40), max_tokens=24)) == 24


def test_more_cache_than_there_is_memory_is_refused(folder: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"--kv-cache-memory asks for 1048576\.00 GiB, .* lower it"):
        Driver.of(folder, kv_cache_memory_bytes=1 << 50)


def test_without_a_given_size_the_cache_holds_what_the_sequences_can_use_and_no_more(folder: Path) -> None:
    ready = Driver.of(folder, max_num_seqs=3, max_model_len=100).engine.ready
    assert ready.num_blocks == 3 * 7  # blocks of 16 for 100 tokens, three times


def test_a_limit_below_the_machines_memory_is_what_utilization_is_a_share_of(folder: Path) -> None:
    """The planner takes the processes' share of the same memory, so that a pod that sizes itself is no larger."""
    ready = Driver.of(folder, memory_limit_bytes=700 << 20, gpu_memory_utilization=0.8, max_num_seqs=256).engine.ready
    assert ready.memory_bytes["total"] == 700 << 20
    taken = sum(ready.memory_bytes[kind] for kind in ("weights", "activations", "kv_cache"))
    assert taken <= int(0.8 * (700 << 20)) - PROCESS_BYTES


def test_a_start_after_a_kill_has_a_smaller_cache(folder: Path, tmp_path: Path) -> None:
    settings = {"kv_cache_memory_bytes": 64 * BLOCK_BYTES, "start_record": tmp_path / "start.json"}
    first = Driver.of(folder, **settings).engine.ready
    second = Driver.of(folder, **settings).engine.ready
    assert (first.num_blocks, second.num_blocks) == (63, 47)


def test_a_start_after_a_kill_has_less_than_the_sequences_could_use(folder: Path, tmp_path: Path) -> None:
    """However much more memory there is: the cache that was too large held no more than that."""
    settings = {"max_num_seqs": 4, "max_model_len": 128, "start_record": tmp_path / "start.json"}
    first = Driver.of(folder, **settings).engine.ready
    second = Driver.of(folder, **settings).engine.ready
    assert (first.num_blocks, second.num_blocks) == (32, 23)


def test_a_length_beyond_the_models_context_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 257 is beyond the model's context of 256 tokens"):
        Driver.of(folder, max_model_len=257)


def test_ready_accounts_for_the_memory_by_kind(folder: Path) -> None:
    ready = Driver.of(folder, kv_cache_memory_bytes=30 * BLOCK_BYTES).engine.ready
    assert ready.num_blocks == 29
    assert ready.memory_bytes["kv_cache"] == 30 * BLOCK_BYTES
    header = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert ready.memory_bytes["weights"] == (folder / "model.safetensors").stat().st_size - header
    assert 0 < ready.memory_bytes["activations"] < ready.memory_bytes["total"]


def test_the_cache_can_be_narrower_than_the_model(folder: Path) -> None:
    exact = Driver.of(folder, kv_cache_memory_bytes=64 * BLOCK_BYTES)
    narrow = Driver.of(folder, kv_cache_memory_bytes=64 * BLOCK_BYTES, kv_cache_dtype="bfloat16")
    assert narrow.engine.ready.num_blocks > 1.9 * exact.engine.ready.num_blocks
    assert len(narrow.answer("r", prompt_of(30))) == 16
