import harness.triton_interpreter  # noqa: F401
from llmservice_server.engine.graph_capture import graph_bytes


def test_the_first_graph_takes_the_memory_that_the_others_share() -> None:
    assert graph_bytes(largest=1000, another=10, num_graphs=35) == 1340
    assert graph_bytes(largest=1000, another=1000, num_graphs=1) == 1000
