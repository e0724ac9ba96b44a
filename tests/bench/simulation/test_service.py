from pathlib import Path
from typing import Any

import pytest

from llmservice_bench.simulation.fleet import Fleet
from llmservice_bench.simulation.policies import Service, Static
from llmservice_bench.simulation.service import SimulationError, fleet_config, replica_config
from llmservice_operator.scaling.from_manifest import sized_service
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.model.source import ModelFigures
from llmservice_planner.traffic.traces import TraceRequest
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.scheduler import continuous_config


def test_a_replica_has_the_sizes_that_the_operator_gives_its_pods(manifest: dict[str, Any], service: Service) -> None:
    plan = service.sized.plan
    config = replica_config(service.sized, service.latency)
    assert config.num_blocks == plan.num_blocks
    assert config.max_model_len == plan.max_model_len == 4096
    assert config.scheduler.max_num_seqs == plan.max_num_seqs
    assert config.itl_target_s == 0.12
    served = EngineConfig(
        model=Path("model"), max_num_seqs=plan.max_num_seqs, max_num_batched_tokens=plan.max_num_batched_tokens
    )
    assert config.scheduler == continuous_config(served, plan.max_num_seqs, None)
    manifest["spec"]["engine"] |= {"maxNumSeqs": 7, "sizing": {"expectedTokens": 700}}
    manifest["spec"]["lanes"] = {"batchOrder": "sjf"}
    scheduler = replica_config(sized_service(manifest), service.latency).scheduler
    assert (scheduler.max_num_seqs, scheduler.expected_tokens, scheduler.batch.order) == (7, 700, "sjf")


def test_prompts_that_share_nothing_need_no_prefix_cache(service: Service) -> None:
    trace = [TraceRequest(number * 0.3, 300, 60) for number in range(120)]
    without = fleet_config(service.sized, service.latency, trace)
    assert not without.replica.scheduler.prefix_caching
    marked = [TraceRequest(each.arrival_s, 300, 60, (number,)) for number, each in enumerate(trace)]
    cached = fleet_config(service.sized, service.latency, marked)
    assert cached.replica.scheduler.prefix_caching
    times = [[each.ended_s for each in Fleet(config, trace, Static(1)).run().requests] for config in (without, cached)]
    assert times[0] == times[1]


def test_an_encoder_is_refused(manifest: dict[str, Any], service: Service) -> None:
    config = {"model_type": "bert", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 4096}
    encoder = sized_service(manifest, ModelFigures(ModelShape.from_config(config)))
    with pytest.raises(SimulationError, match=r"the model is an encoder .*: size it with `llmservice plan`"):
        replica_config(encoder, service.latency)
