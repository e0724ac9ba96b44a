import copy
from typing import Any

import pytest

from llmservice_bench.models import LLAMA_3_8B
from llmservice_bench.simulation.policies import Service
from llmservice_bench.simulation.replica import ReplicaConfig
from llmservice_bench.simulation.service import latency_of
from llmservice_operator.scaling.from_manifest import sized_service
from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_server.engine.admission_queue import QueueBound
from llmservice_server.engine.scheduler import SchedulerConfig

MANIFEST: dict[str, Any] = {
    "apiVersion": "serving.llmservice.io/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {
            "uri": "hf://meta-llama/Meta-Llama-3-8B-Instruct",
            "shape": LLAMA_3_8B,
        },
        "resources": {"gpu": {"product": "l4", "count": 1}, "requests": {"cpu": "4", "memory": "32Gi"}},
        "engine": {"maxModelLen": 4096},
        "slo": {"ttftP99": "2s", "itlP99": "120ms"},
        "autoscaling": {"minReplicas": 1, "maxReplicas": 6},
    },
}


LATENCY = LatencyModel(
    step_s=0.0011, sequence_s=0.00013, weights_s=0.0107, token_s=0.00071, kv_token_s=0.0000313, pair_s=0.0000017
)


@pytest.fixture
def manifest() -> dict[str, Any]:
    """An 8B model on L4s, with targets and 1 to 6 replicas."""
    return copy.deepcopy(MANIFEST)


@pytest.fixture
def service(manifest: dict[str, Any]) -> Service:
    sized = sized_service(manifest)
    return Service(sized, latency_of(sized))


@pytest.fixture(scope="session")
def replica_config() -> ReplicaConfig:
    """A small replica: about 90 tokens a second of one request, and 8 requests at once."""
    return ReplicaConfig(
        latency=LATENCY,
        scheduler=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_tokens=32, expected_tokens=60
        ),
        groups=BlockGroups(4, 1, (None,), 64),
        num_blocks=200,
        max_model_len=400,
        itl_target_s=0.02,
        queue=QueueBound(12, 2000),
        request_timeout_s=60.0,
    )
