"""What is simulated, from a manifest: the engine's settings and the fleet's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmservice_bench.simulation.fleet import FleetConfig
from llmservice_bench.simulation.replica import ReplicaConfig
from llmservice_operator.api import units
from llmservice_operator.scaling.from_manifest import SizedService
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_planner.traffic.traces import TraceRequest
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.scheduler import continuous_config

CPU_PREFILL_TOKENS = 512
"""Of a step on a CPU, which computes more no faster."""


class SimulationError(ValueError):
    """What was asked for cannot be simulated; the message says what to change."""


def latency_of(sized: SizedService, measured: LatencyModel | None = None) -> LatencyModel:
    """Of the manifest's model on its GPU, or as measured; raises SimulationError where neither is known."""
    if measured is not None:
        return measured
    model = sized.sized.latency
    if model is None:
        raise SimulationError(
            f"the rates of {sized.request.device.name} are unknown: measure a running server with"
            " `llmservice calibrate -o FILE`, and give --latency FILE"
        )
    return model


def replica_config(sized: SizedService, latency: LatencyModel) -> ReplicaConfig:
    """As a pod of the service is started, with the defaults of `llmservice serve` for what the manifest leaves open.

    Raises SimulationError for an encoder.
    """
    plan, spec, shape = sized.plan, sized.service.spec, sized.request.shape
    if shape.is_encoder:
        raise SimulationError(
            f"the model is an encoder ({shape.architecture}), and models that generate are simulated: size it with"
            " `llmservice plan`"
        )
    engine = EngineConfig(
        model=Path(spec.model.uri),
        block_size=plan.block_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        prefix_caching=spec.engine.prefix_caching,
        expected_tokens=sized.request.typical_tokens,
        batch_order=spec.lanes.batch_order,
    )
    slo = spec.slo
    return ReplicaConfig(
        latency=latency,
        scheduler=continuous_config(engine, plan.max_num_seqs, CPU_PREFILL_TOKENS if sized.request.on_cpu else None),
        groups=sized.request.shape.block_groups(plan.block_size, plan.max_num_batched_tokens),
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        itl_target_s=math.inf if slo.itl_p99_s is None else slo.itl_p99_s,
    )


def fleet_config(
    sized: SizedService,
    latency: LatencyModel,
    trace: Sequence[TraceRequest],
    *,
    initial: int | None = None,
    **events: Any,
) -> FleetConfig:
    """`initial` None: the manifest's least replicas. `events`: further fields of FleetConfig."""
    replica = replica_config(sized, latency)
    if not any(each.hash_ids for each in trace):  # no prompt can be in a cache, so that none needs to be kept
        replica = replace(replica, scheduler=replace(replica.scheduler, prefix_caching=False))
    return FleetConfig(
        replica=replica,
        initial=sized.replicas if initial is None else initial,
        drain_s=units.seconds(sized.service.spec.drain_timeout),
        gpus=max(1, sized.request.device_count),
        by_prefix=sized.service.spec.routing.strategy == "prefixAffinity",
        **events,
    )
