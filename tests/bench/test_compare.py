"""The comparison with other engines: closed loop, records, and the peers that need no extra."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from multiprocessing import active_children

import pytest

from compare import (
    BY_TRANSFORMERS,
    CLASSES,
    CONTINUOUS,
    FORMATS,
    IN_FLIGHT,
    INT4,
    INT8,
    LLAMA_CPP,
    OURS,
    Q4_K_M,
    Q8_0,
    STATIC,
    Shown,
    checks,
    compare,
    finalists,
    format_checks,
    rotated,
    speeds,
)
from llmservice_bench.report import Report
from llmservice_bench.trace import Lengths
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from peers.process import PeerProcess
from peers.workload import Answer, Job, PeerRequest, agreement, closed_loop, draw_requests, in_turns, records

pytestmark = pytest.mark.slow

SPEC = TinyModelSpec(layers=2, hidden_size=32, heads=4, kv_heads=2)


class Counting:
    """Generates the tokens 0, 1, 2 … for each request and records the most requests at once."""

    def __init__(self) -> None:
        self.left: dict[int, PeerRequest] = {}
        self.drawn: dict[int, int] = {}
        self.most = 0

    def add(self, index: int, request: PeerRequest) -> None:
        self.left[index], self.drawn[index] = request, 0
        self.most = max(self.most, len(self.left))

    def step(self) -> Sequence[tuple[int, int]]:
        tokens = [(index, self.drawn[index]) for index in self.left]
        for index, token in tokens:
            self.drawn[index] = token + 1
            if token + 1 == self.left[index].output_tokens:
                del self.left[index]
        return tokens


def test_each_finished_answer_starts_the_next_request_within_the_limit() -> None:
    requests = [PeerRequest([1], count) for count in (3, 1, 2, 5, 1)]
    server = Counting()
    answers = closed_loop(server, requests, in_flight=2)
    assert [answer.token_ids for answer in answers] == [list(range(request.output_tokens)) for request in requests]
    assert server.most == 2
    assert answers[2].sent_s >= answers[1].token_times_s[-1]


def test_latencies_of_a_record_count_from_sending() -> None:
    [record] = records([PeerRequest([1, 2], 3)], [Answer(10.0, [7, 8, 9], [10.5, 10.75, 11.25])])
    assert (record.prompt_tokens, record.output_tokens, record.error) == (2, 3, None)
    assert (record.ttft_s, record.itl_s, record.e2e_s) == (0.5, [0.25, 0.5], 1.25)


def test_answer_of_the_wrong_length_is_a_failure() -> None:
    [record] = records([PeerRequest([1], 2)], [Answer(0.0, [7], [0.5])])
    assert record.error == "1 tokens, expected 2"


def test_agreement_ends_with_the_first_token_that_differs() -> None:
    requests = [PeerRequest([1], 3), PeerRequest([1], 1)]
    left = [Answer(0.0, [1, 2, 3]), Answer(0.0, [4])]
    assert agreement(requests, left, left) == 1
    assert agreement(requests, left, [Answer(0.0, [1, 9, 3]), Answer(0.0, [4])]) == 0.5


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, SPEC)
    lengths = [Lengths(5, 3), Lengths(40, 12), Lengths(9, 1), Lengths(20, 6)]
    requests = draw_requests(lengths, 6, SPEC.vocab_size, seed=0)
    return Job(model=folder, gguf=folder / "model.gguf", dtype="float32", requests=requests, in_flight=3, threads=1)


def test_warm_up_asks_for_as_long_prompts_but_none_of_the_same(job: Job) -> None:
    warm_up = job.warm_up()
    assert [len(request.prompt_token_ids) for request in warm_up] == [
        len(request.prompt_token_ids) for request in job.requests[:3]
    ]
    assert all(
        one.prompt_token_ids != other.prompt_token_ids for one, other in zip(warm_up, job.requests, strict=False)
    )


def answers_of(peer: str, job: Job) -> list[Answer]:
    module, _, made = CLASSES[peer].partition(":")
    server = getattr(import_module(module), made)(job)
    answers: list[Answer] = server.serve(job.requests)
    server.close()
    return answers


@pytest.fixture(scope="module")
def our_answers(job: Job) -> list[Answer]:
    return answers_of(OURS, job)


def test_ours_answers_in_full_and_in_order(job: Job, our_answers: list[Answer]) -> None:
    assert [len(answer.token_ids) for answer in our_answers] == [request.output_tokens for request in job.requests]
    for answer in our_answers:
        times = [answer.sent_s, *answer.token_times_s]
        assert all(earlier <= later for earlier, later in itertools.pairwise(times))


def test_a_request_that_our_engine_refuses_is_an_error_and_not_waited_for(job: Job) -> None:
    server = import_module("peers.ours").OurEngine(job)
    with pytest.raises(RuntimeError, match="request 0: 200 prompt tokens"):
        closed_loop(server, [PeerRequest([5] * 200, 3)], 1)
    server.close()


def test_static_generate_gives_the_same_tokens(job: Job, our_answers: list[Answer]) -> None:
    answers = answers_of(STATIC, job)
    assert agreement(job.requests, our_answers, answers) == 1
    first, second = answers[:3], answers[3:]
    assert min(answer.token_times_s[0] for answer in second) >= max(answer.token_times_s[-1] for answer in first)


def test_transformers_continuous_batching_gives_the_same_tokens(job: Job, our_answers: list[Answer]) -> None:
    assert agreement(job.requests, our_answers, answers_of(CONTINUOUS, job)) == 1


def test_llama_cpp_gives_the_same_tokens_from_the_file_that_we_write(job: Job, our_answers: list[Answer]) -> None:
    pytest.importorskip("llama_cpp", reason="llama.cpp comes with the extra bench-peers")
    from peers import gguf_file

    gguf_file.write_gguf(job.model, job.gguf, "float32")
    assert agreement(job.requests, our_answers, answers_of(LLAMA_CPP, job)) == 1


def test_peer_in_its_own_process_serves_again_and_again_and_takes_another_job(
    job: Job, our_answers: list[Answer]
) -> None:
    with PeerProcess(CLASSES[OURS]) as process:
        process.load(job)
        first = process.serve(job.requests)
        process.load(replace(job, in_flight=1))
        second = [answer for request in job.requests for answer in process.serve([request])]
    assert agreement(job.requests, our_answers, first) == agreement(job.requests, our_answers, second) == 1


def test_peer_that_dies_is_an_error(job: Job) -> None:
    with (
        PeerProcess(CLASSES[OURS]) as process,
        pytest.raises(RuntimeError, match=r"ours:peer has died \(exit code 1\)"),
    ):
        process.load(replace(job, model=job.model / "missing"))


def test_signal_that_ends_a_peer_is_named(job: Job) -> None:
    others = set(active_children())
    with PeerProcess(CLASSES[OURS]) as process:
        [child] = set(active_children()) - others
        child.kill()
        with pytest.raises(RuntimeError, match=r"has died \(signal SIGKILL\)"):
            process.load(job)


def test_each_peer_is_first_in_one_of_as_many_turns() -> None:
    turns = [rotated(["a", "b", "c"], turn) for turn in range(3)]
    assert turns == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]


def test_single_requests_that_were_served_in_turns_are_laid_end_to_end() -> None:
    requests = [PeerRequest([1], 2), PeerRequest([1], 1)]
    answers = [Answer(10.0, [7, 8], [10.5, 11.0]), Answer(90.0, [9], [90.25])]
    assert [(one.started_s, one.ended_s) for one in in_turns(requests, answers)] == [(0.0, 1.0), (1.0, 1.25)]


def test_ours_and_the_best_of_the_others_take_more_turns(job: Job) -> None:
    answers = [Answer(0.0, [7], [0.5]), Answer(9.0, [7], [9.25])]
    asked = replace(job, requests=(PeerRequest([1], 1), PeerRequest([1], 1), PeerRequest([1], 1)))
    assert speeds(asked, answers) == [2.0, 4.0]
    assert finalists({STATIC: 4.0, OURS: 3.0, LLAMA_CPP: 5.0}) == [OURS, LLAMA_CPP]
    assert finalists({OURS: 3.0}) == [OURS]


def test_tokens_of_single_requests_are_compared_apart_from_those_of_the_batch(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [replace(job, requests=(PeerRequest([1], 2),) * count) for count in (1, 2)]
    same, other = Answer(0.0, [7, 8], [0.5, 1.0]), Answer(0.0, [7, 9], [0.5, 1.0])
    shown = {OURS: Shown([same], [same] * 2), STATIC: Shown([other], [same] * 2)}
    monkeypatch.setattr("compare.jobs", lambda *_: jobs)
    monkeypatch.setattr("compare.measure", lambda *_, **__: shown)
    rows, _ = compare({OURS: CLASSES[OURS], STATIC: CLASSES[STATIC]}, "float32", 1)
    found = {(row["peer"], row["in_flight"]): row["same_tokens_as_ours"] for row in rows}
    assert found == {(OURS, IN_FLIGHT): 1, (OURS, 1): 1, (STATIC, IN_FLIGHT): 0.5, (STATIC, 1): 1}


def test_single_stream_is_compared_per_turn_with_the_best_peer() -> None:
    """A slow period that affects all peers must not decide."""
    answered = Report.of(records([PeerRequest([1], 1)], [Answer(0.0, [7], [0.5])]))
    batches = dict.fromkeys((OURS, STATIC, CONTINUOUS, LLAMA_CPP), answered)
    turns = {OURS: [100.0, 10.0, 120.0], STATIC: [20.0, 5.0, 20.0], CONTINUOUS: [80.0, 20.0, 100.0]}
    ttft_s = {OURS: [0.2, 2.0, 0.3], LLAMA_CPP: [0.1, 4.0]}
    [*_, ttft, check] = checks(batches, turns, ttft_s, "float32")
    assert ttft.measured == pytest.approx(1.25)
    assert CONTINUOUS in check.what
    assert check.measured == pytest.approx(1.2)


def test_formats_are_compared_with_the_same_bits_and_the_same_code() -> None:
    def took(seconds: float) -> Report:
        return Report.of(records([PeerRequest([1], 1)], [Answer(0.0, [7], [seconds])]))

    seconds = {OURS: 1.5, INT8: 1.0, INT4: 1.5, Q8_0: 2.0, Q4_K_M: 3.0, BY_TRANSFORMERS: 2.0, CONTINUOUS: 5.0}
    batches = {peer: took(each) for peer, each in seconds.items()}
    turns = {peer: [10.0 * place] for place, peer in enumerate(FORMATS, start=1)}
    found = format_checks(batches, turns, "bfloat16")
    assert [check.measured for check in found] == [1.5, 2.0, 2.0, 0.4, 2.0, 0.5, 2.5]
    assert [check.met for check in found] == [True, True, True, False, True, False, True]
    del batches[INT8]
    assert format_checks(batches, turns, "bfloat16") == found[4:]
