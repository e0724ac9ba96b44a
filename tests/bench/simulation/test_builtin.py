from typing import Any

from llmservice_bench.simulation.builtin import TICK_JITTER, TICK_S, BuiltIn
from llmservice_bench.simulation.fleet import Fleet
from llmservice_bench.simulation.outcome import Targets
from llmservice_bench.simulation.policies import Service
from llmservice_bench.simulation.report import notable
from llmservice_bench.simulation.service import fleet_config, latency_of
from llmservice_operator import loops
from llmservice_operator.scaling.from_manifest import sized_service
from llmservice_operator.settings import OperatorSettings
from llmservice_planner.traffic.traces import TraceRequest


def test_it_ticks_as_the_operator_does() -> None:
    assert OperatorSettings().tick_s == TICK_S
    assert loops._JITTER == TICK_JITTER


def test_it_adds_replicas_under_load_with_reasons_and_removes_them_after(service: Service) -> None:
    busy = [TraceRequest(number * 0.25, 400, 120) for number in range(480)]
    quiet = [TraceRequest(120.0 + number * 5.0, 400, 120) for number in range(130)]
    config = fleet_config(service.sized, service.latency, busy, startup_s=(20.0,))
    outcome = Fleet(config, [*busy, *quiet], BuiltIn(service.sized), 770.0).run()
    assert outcome.outcomes["finished"] == 610
    up = [each for each in outcome.changes if each.decision.replicas > each.before]
    down = [each for each in outcome.changes if each.decision.replicas < each.before]
    assert up
    assert up[0].time_s < 60.0
    assert down
    assert down[-1].decision.replicas == 1
    assert all(each.decision.reasons for each in outcome.decisions)


def test_a_service_at_zero_is_woken_by_a_held_request_and_sleeps_again(manifest: dict[str, Any]) -> None:
    manifest["spec"]["autoscaling"] = {"minReplicas": 0, "maxReplicas": 3, "idleTimeout": "60s"}
    sized = sized_service(manifest)
    trace = [TraceRequest(30.3, 400, 50), TraceRequest(30.4, 400, 50)]
    config = fleet_config(sized, latency_of(sized), trace, startup_s=(20.0,))
    outcome = Fleet(config, trace, BuiltIn(sized), 300.0).run()
    assert [(each.before, each.decision.replicas) for each in outcome.changes] == [(0, 1), (1, 0)]
    assert outcome.changes[0].time_s == 31.0
    assert outcome.changes[0].decision.reasons[0].startswith("held: ")
    assert all(each.ttft_s is not None and 20.0 < each.ttft_s < 22.5 for each in outcome.requests)


def test_without_autoscaling_the_replicas_of_the_spec_stay(manifest: dict[str, Any]) -> None:
    del manifest["spec"]["autoscaling"]
    manifest["spec"]["replicas"] = 2
    sized = sized_service(manifest)
    trace = [TraceRequest(number * 0.2, 400, 120) for number in range(100)]
    config = fleet_config(sized, latency_of(sized), trace)
    outcome = Fleet(config, trace, BuiltIn(sized)).run()
    assert config.initial == 2
    assert outcome.changes == []
    assert outcome.decisions[0].decision.reasons == ("spec.replicas is 2",)


def test_a_target_that_no_replica_meets_is_reported_once_and_asks_for_none(manifest: dict[str, Any]) -> None:
    """As in the cluster: p99 TTFT is no reason for replicas while the longest prompts alone take longer."""
    manifest["spec"]["slo"] = {"ttftP99": "300ms"}
    sized = sized_service(manifest)
    trace = [TraceRequest(number * 0.8, 3000, 20) for number in range(200)]
    config = fleet_config(sized, latency_of(sized), trace, startup_s=(20.0,))
    outcome = Fleet(config, trace, BuiltIn(sized)).run()
    infeasible = [(record, why) for record, why in notable(outcome) if why[0].startswith("SLOFeasible=")]
    ((record, why),) = infeasible
    assert why[0].startswith("SLOFeasible=False: PromptsTooLong: 1 % of the prompts have at least ")
    assert "which takes 0." in why[0]
    assert "the target is 0.30s" in why[0]
    later = [each.decision for each in outcome.decisions if each.time_s >= record.time_s]
    assert len(later) > 10
    assert all(each.slo is not None and each.slo.status == "False" for each in later)
    assert not any(reason.startswith("ttft: ") for each in later for reason in each.reasons)
    decisions = outcome.to_dict(Targets())["decisions"]
    assert decisions[-1]["slo_feasible"]["reason"] == "PromptsTooLong"
