from types import SimpleNamespace

import pytest

from llmservice_server.engine.interfaces import Plan, Scheduled
from llmservice_server.engine.step_timer import StepTimer, StepWork, step_work
from llmservice_server.types.messages import StepTime

REQUEST = SimpleNamespace()  # no figure of it counts


def plan_of(*runs: tuple[int, int], num_decodes: int = 0) -> Plan:
    return Plan([Scheduled(REQUEST, start, num_tokens, True) for start, num_tokens in runs], num_decodes)


@pytest.mark.parametrize(
    ("runs", "work"),
    [
        ([], StepWork()),
        ([(9, 1), (99, 1)], StepWork(num_seqs=2, context_tokens=110)),
        ([(0, 3)], StepWork(prompt_tokens=3, prompt_chunks=1, attention_pairs=1 + 2 + 3)),
        ([(4, 2), (9, 1)], StepWork(1, 10, prompt_tokens=2, prompt_chunks=1, attention_pairs=5 + 6)),
        ([(0, 2), (1, 2)], StepWork(prompt_tokens=4, prompt_chunks=2, attention_pairs=1 + 2 + 2 + 3)),
    ],
)
def test_the_work_of_a_step_counts_tokens_contexts_and_pairs(runs: list[tuple[int, int]], work: StepWork) -> None:
    assert step_work(plan_of(*runs)) == work


def test_the_work_of_a_step_that_only_decodes_is_the_same_where_the_scheduler_has_counted() -> None:
    runs = [(9, 1), (99, 1), (0, 1)]
    assert step_work(plan_of(*runs, num_decodes=3)) == step_work(plan_of(*runs)) == StepWork(3, 111)


def test_chunks_have_the_pairs_of_the_whole_prompt() -> None:
    whole, parts = step_work(plan_of((0, 1000))), step_work(plan_of((0, 400), (400, 600)))
    assert whole.attention_pairs == parts.attention_pairs


WORK = StepWork(num_seqs=1, context_tokens=7)


def test_steps_without_a_gap_are_timed_from_result_to_result() -> None:
    timer = StepTimer()
    timer.end(WORK, began_s=10.0, now=10.5)
    assert timer.take() == StepTime(0.5, 1, 7)
    timer.end(WORK, began_s=10.6, now=11.5)
    assert timer.take() == StepTime(1.0, 1, 7)
    assert timer.take() is None


def test_after_a_pause_a_step_is_timed_from_its_begin() -> None:
    timer = StepTimer()
    timer.end(WORK, began_s=10.0, now=10.5)
    timer.pause()
    timer.end(WORK, began_s=99.0, now=99.25)
    assert timer.take() == StepTime(0.25, 1, 7)


def test_a_step_beside_which_something_else_is_computed_is_not_timed() -> None:
    timer = StepTimer()
    timer.end(WORK, began_s=None, now=10.5)
    assert timer.take() is None
    timer.end(WORK, began_s=10.5, now=11.0)
    assert timer.take() == StepTime(0.5, 1, 7)
