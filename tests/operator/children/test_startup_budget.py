from __future__ import annotations

import pytest

from llmservice_operator.children.startup_budget import startup_budget

GIB = 2**30


@pytest.mark.parametrize(
    ("weights_gib", "downloads", "load_s", "progress_s"),
    [
        (0.01, False, 600, 1500),
        (14.96, False, 600, 1500),
        (131.4, False, 1651, 2551),
        (131.4, True, 1651, 13839),
    ],
)
def test_patience_grows_with_the_weights(weights_gib: float, downloads: bool, load_s: int, progress_s: int) -> None:
    budget = startup_budget(weights_gib * GIB, downloads=downloads)

    assert (budget.load_s, budget.progress_s) == (load_s, progress_s)


@pytest.mark.parametrize("weights_gib", [0, 1, 100, 1000])
@pytest.mark.parametrize("downloads", [False, True])
def test_a_rollout_is_never_called_stuck_while_a_pod_may_still_load(weights_gib: int, downloads: bool) -> None:
    budget = startup_budget(weights_gib * GIB, downloads=downloads)

    assert budget.progress_s > budget.load_s
