from __future__ import annotations

import pytest

from llmservice_operator.scaling.overload import OverloadTimer


@pytest.mark.parametrize(
    ("history", "lasted"),
    [
        ([(1, 1, 0), (3, 1, 10), (3, 1, 40), (3, 2, 70)], [60.0]),
        ([(3, 1, 10), (3, 2, 70), (3, 3, 75)], [60.0, 5.0]),  # the second new pod, from where the first one left it
        ([(3, 1, 10), (1, 1, 20), (3, 1, 50), (2, 2, 60)], [10.0]),  # it went by itself, and came again
        ([(2, 0, 0), (2, 1, 30)], []),  # a service that starts has no overload
        ([(2, 2, 0), (2, 2, 30)], []),
    ],
)
def test_an_overload_lasts_until_one_more_pod_serves(
    history: list[tuple[int, int, float]], lasted: list[float]
) -> None:
    timer = OverloadTimer()

    seen = [timer.observe(wanted, serving, now_s) for wanted, serving, now_s in history]

    assert [one for one in seen if one is not None] == lasted
