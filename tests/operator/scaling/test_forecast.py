from __future__ import annotations

from dataclasses import replace

import pytest

from llmservice_operator.scaling.capacity import ReplicaModel
from llmservice_operator.scaling.demand import Demand
from llmservice_operator.scaling.forecast import work_done
from llmservice_operator.scaling.load import Load, PodLoad

REQUEST = Demand(1, 1000, 200)


def load(*pods: tuple[Demand | None, bool]) -> Load:
    return Load(
        "pods", tuple(PodLoad(str(n), 20, 3, 0.9, work=work, is_full=full) for n, (work, full) in enumerate(pods))
    )


@pytest.fixture
def full(replica: ReplicaModel) -> Demand:
    """What a full replica does in a second, by the model."""
    cost = replica.cost(REQUEST)
    assert cost is not None
    return REQUEST.scaled(1 / cost.replicas(REQUEST))


def test_work_is_in_seconds_of_a_full_replica(replica: ReplicaModel, full: Demand) -> None:
    pods = load((full.scaled(0.5), True), (full.scaled(0.7), True), (full.scaled(0.1), False), (None, True))

    mean, certain = work_done(pods, replica, REQUEST)

    assert mean == pytest.approx(0.6)
    assert 0 < certain < 0.5


def test_full_replicas_are_compared_with_full_ones_whatever_the_target(replica: ReplicaModel, full: Demand) -> None:
    mean, _ = work_done(load((full, True)), replace(replica, itl_p99_s=0.1), REQUEST)

    assert mean == pytest.approx(1.0)


def test_the_tokens_of_answers_that_neither_begin_nor_end_are_work(replica: ReplicaModel, full: Demand) -> None:
    mean, certain = work_done(load((Demand(0, 0, full.output_tokens), True)), replica, REQUEST)

    assert mean is not None
    assert mean > 0.5
    assert certain == 0
