from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from llmservice_server.ipc.step_times import StepSums, StepTimes
from llmservice_server.types.messages import StepTime


def observed(*steps: StepTime) -> StepTimes:
    times = StepTimes("llmservice_", {})
    for step in steps:
        times.observe(step)
    return times


def test_steps_are_summed_by_kind_and_number_of_sequences() -> None:
    steps = observed(
        StepTime(0.010, 3, 300),
        StepTime(0.014, 4, 500),
        StepTime(0.020, 5, 700),
        StepTime(0.050, 3, 310, 64, 1, 2080),
    )
    assert steps.sums == [
        StepSums("decode", 4, 2, 0.024, 7, 800),
        StepSums("decode", 8, 1, 0.020, 5, 700),
        StepSums("mixed", 4, 1, 0.050, 3, 310, 64, 1, 2080),
    ]


def test_the_histogram_counts_each_step_under_its_kind() -> None:
    registry = CollectorRegistry()
    registry.register(observed(StepTime(0.004, 1, 9), StepTime(0.006, 1, 9), StepTime(20.0, 0, 0, 64, 1, 2080)))
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    values = {(each.name, each.labels["kind"], each.labels.get("le")): each.value for each in family.samples}
    name = "llmservice_step_seconds"
    assert values[f"{name}_bucket", "decode", "0.005"] == 1
    assert values[f"{name}_bucket", "decode", "0.0075"] == 2
    assert values[f"{name}_count", "decode", None] == 2
    assert values[f"{name}_sum", "decode", None] == 0.01
    assert values[f"{name}_bucket", "mixed", "10.0"] == 0
    assert values[f"{name}_bucket", "mixed", "+Inf"] == 1
