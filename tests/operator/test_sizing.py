from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.api.resource import LLMService
from llmservice_operator.children.deployment import server_args
from llmservice_operator.locations import Figures, Model, ModelSourceError
from llmservice_operator.sizing import (
    Sized,
    Sizer,
    SizingProblem,
    parse_report,
    size,
)
from llmservice_operator.status.conditions import sizing_verdict
from llmservice_operator.status.model_status import measured_status, sizing_status
from llmservice_planner.sizing.gpu import GPU, find_gpu

CPU = {"gpu": {"count": 0}, "requests": {"cpu": "1", "memory": "2Gi"}}


def test_auto_finds_how_many_sequences_fit(service_of: Any, model: Model) -> None:
    service: LLMService = service_of(engine={"maxModelLen": 1024})

    answer = size(service.spec, model)

    assert isinstance(answer, Sized)
    assert answer.plan.max_num_seqs > 8
    assert answer.plan.max_model_len == 1024


def test_the_users_number_is_used(sized: Sized) -> None:
    assert (sized.plan.max_num_seqs, sized.plan.limited_by) == (8, "maxNumSeqs")


@pytest.mark.parametrize(
    ("memory_gib", "taken_gib", "note"),
    [(None, 79.10, None), (20, 20, "is taken, it is less than the 79.10 GiB"), (96, 79.10, "is not taken, it is more")],
)
def test_the_smaller_of_two_figures_for_a_gpus_memory_is_used_and_noted(
    memory_gib: float | None, taken_gib: float, note: str | None, service_of: Any, model: Model
) -> None:
    gpu = {"product": "h100-80gb"} | ({"memoryGiB": memory_gib} if memory_gib else {})

    answer = size(service_of(resources={"gpu": gpu}, engine={}).spec, model)

    assert isinstance(answer, Sized)
    assert answer.device.memory_bytes == int(taken_gib * 2**30)
    assert (note in answer.notes[0]) if note else (answer.notes == ())


def test_a_mig_device_has_the_rates_of_its_slices(service_of: Any, model: Model) -> None:
    gpu = {"product": "h100-80gb", "memoryGiB": 40, "resourceName": "nvidia.com/mig-3g.40gb"}

    answer = size(service_of(resources={"gpu": gpu}, engine={}).spec, model)

    whole = find_gpu("h100-80gb")
    assert isinstance(answer, Sized)
    assert isinstance(answer.device, GPU)
    assert answer.device.memory_bytes == 40 * 2**30
    assert whole.bandwidth_bytes_per_s
    assert whole.flops_16bit
    assert answer.device.bandwidth_bytes_per_s == pytest.approx(whole.bandwidth_bytes_per_s * 40 / 79.10, rel=1e-3)
    assert answer.device.flops_16bit == pytest.approx(whole.flops_16bit * 3 / 7)


@pytest.mark.parametrize(
    ("spec", "lane", "expected", "reasons"),
    [
        ({}, "interactive", None, ()),
        ({"workload": "chat"}, "interactive", "1536", ("chat, 1536 expected tokens",)),
        ({"workload": "longContext"}, "interactive", "1024", ("longContext, 1024 expected tokens",)),
        ({"workload": "batch"}, "batch", None, ("batch, more sequences than the ridge",)),
        ({"workload": "batch", "lanes": {"default": "interactive"}}, "interactive", None, ("batch, more",)),
        ({"workload": "chat", "engine": {"sizing": {"expectedTokens": 99}}}, "interactive", "99", ()),
    ],
)
def test_workload_reaches_the_server_and_its_reasons_the_status(
    spec: dict[str, Any], lane: str, expected: str | None, reasons: tuple[str, ...], service_of: Any, model: Model
) -> None:
    service: LLMService = service_of(**{"engine": {}, "resources": {"gpu": {"product": "l40s"}}, **spec})

    answer = size(service.spec, model)

    assert isinstance(answer, Sized)
    args = server_args(service, answer)
    assert args[args.index("--default-lane") + 1] == lane
    assert (args[args.index("--expected-tokens") + 1] if "--expected-tokens" in args else None) == expected
    assert args[args.index("--max-num-seqs") + 1] == str(answer.plan.max_num_seqs)
    status = sizing_status(answer, None)
    assert status is not None
    explained = [line for line in (status.explanation or "").splitlines() if line.startswith("workload: ")]
    assert len(explained) >= len(reasons)
    for reason in reasons:
        assert any(line.startswith(f"workload: {reason}") for line in explained)


def test_workload_of_another_kind_of_model_is_a_problem_of_the_sizing(service_of: Any, model: Model) -> None:
    answer = size(service_of(workload="embeddings").spec, model)

    assert isinstance(answer, SizingProblem)
    assert answer.reason == "InvalidSizing"
    assert "workload embeddings is for an encoder" in answer.message


def test_server_that_sizes_itself_takes_only_the_lane_of_a_workload(service_of: Any, model: Model) -> None:
    service = service_of(workload="batch", engine={})
    unread = replace(model, shape=None, figures_from="pod")

    answer = size(service.spec, unread)

    assert isinstance(answer, Sized)
    assert "workload: batch chooses only the lane, as the server sizes itself: set model.shape" in answer.notes
    args = server_args(service, answer)
    assert args[args.index("--default-lane") + 1] == "batch"
    assert "--expected-tokens" not in args


def test_a_quantised_checkpoint_that_the_planner_cannot_count_is_served_as_its_pod_reports(
    service_of: Any, model: Model
) -> None:
    shape = replace(model.shape, architecture="olmo2", quantization="gptq")
    report = parse_report(json.dumps(REPORT | {"shape": shape.to_fields()}).encode())

    answer = size(service_of(engine={}).spec, replace(model, shape=report.shape, figures_from="pod"), report)

    assert isinstance(answer, Sized)
    assert (answer.max_num_seqs, answer.self_sized) == (REPORT["max_num_seqs"], True)


def test_a_gpu_may_have_less_memory_than_in_the_catalogue(service_of: Any, model: Model) -> None:
    small = size(service_of(resources={"gpu": {"product": "h100-80gb", "memoryGiB": 20}}, engine={}).spec, model)
    large = size(service_of(resources={"gpu": {"product": "h100-80gb"}}, engine={}).spec, model)

    assert isinstance(small, Sized)
    assert isinstance(large, Sized)
    assert isinstance(small.device, GPU)
    assert small.plan.num_blocks < large.plan.num_blocks


@pytest.mark.parametrize(
    ("spec", "changes", "reason", "advice"),
    [
        pytest.param(
            {"resources": {"gpu": {"product": "h9000"}}}, {}, "UnknownGPU", "resources.gpu.product", id="unknown GPU"
        ),
        pytest.param(
            {"resources": {"gpu": {"product": "l4", "count": 2}}}, {}, "Unsupported", "set it to 1", id="several GPUs"
        ),
        pytest.param(
            {"resources": {"gpu": {"count": 0}, "requests": {"memory": "256Mi"}}},
            {},
            "DoesNotFit",
            "What would help",
            id="too little memory",
        ),
        pytest.param(
            {},
            {"quantization": "awq", "architecture": "bert", "encoder_parameters": 10**8},
            "UnsupportedModel",
            "unquantised",
            id="a quantised encoder",
        ),
        pytest.param(
            {"engine": {"kvCacheDtype": "fp8"}, "resources": {"gpu": {"product": "a100-80gb"}}},
            {},
            "InvalidSizing",
            "for which a100-80gb has no arithmetic: choose another",
            id="an fp8 cache without fp8 units",
        ),
        pytest.param(
            {"engine": {}, "resources": CPU},
            {"max_position_embeddings": None},
            "InvalidSizing",
            "max_model_len",
            id="no length",
        ),
    ],
)
def test_an_impossible_spec_is_a_problem_with_a_remedy(
    spec: dict[str, Any], changes: dict[str, Any], reason: str, advice: str, service_of: Any, model: Model
) -> None:
    answer = size(service_of(**spec).spec, replace(model, shape=replace(model.shape, **changes)))

    assert isinstance(answer, SizingProblem)
    assert answer.reason == reason
    assert advice in answer.message


def test_no_remedy_is_proposed_that_the_server_would_refuse(service_of: Any, model: Model) -> None:
    large = replace(
        model.shape, layers=80, hidden_size=8192, heads=64, kv_heads=64, head_dim=128, intermediate_size=28672
    )

    answer = size(service_of(resources={"gpu": {"product": "h100-80gb"}}, engine={}).spec, replace(model, shape=large))

    assert isinstance(answer, SizingProblem)
    assert "--gpu-count" not in answer.message


MIB = 2**20
REPORT: dict[str, Any] = {
    "max_num_seqs": 7,
    "max_model_len": 256,
    "block_size": 16,
    "num_blocks": 1023,
    "memory_bytes": {"weights": 512 * MIB, "kv_cache": 1024 * 16 * 4096, "activations": 256 * MIB, "total": 2**34},
    "shape": None,
}


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b"null", b'{"memory_bytes": 3}', b'{"memory_bytes": {}, "max_num_seqs": Infinity}']
)
def test_an_invalid_report_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="no answer of llmservice serve"):
        parse_report(text)


def test_a_shape_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="no answer of llmservice serve: ShapeError"):
        parse_report(json.dumps({**REPORT, "shape": {"layers": 2}}).encode())


NOW = 1000.0


class Reader:
    """Returns the model, or raises `error`; counts its calls."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.error: ModelSourceError | None = None
        self.calls = 0

    async def read(self, source: ModelSource, known: Figures | None) -> Model:
        self.calls += 1
        if self.error:
            raise self.error
        return self.model


async def test_a_model_is_read_once_until_the_spec_changes(service_of: Any, model: Model) -> None:
    reader = Reader(model)
    sizer = Sizer(reader.read)

    for seconds in range(0, 500, 5):
        await sizer.size(service_of().spec, NOW + seconds)
    assert reader.calls == 1

    changed = await sizer.size(service_of(engine={"maxNumSeqs": 3}).spec, NOW + 501)
    assert isinstance(changed, Sized)
    assert (reader.calls, changed.plan.max_num_seqs) == (2, 3)


async def test_scaling_alone_reads_nothing_anew(service_of: Any, model: Model) -> None:
    reader = Reader(model)
    sizer = Sizer(reader.read)

    await sizer.size(service_of(replicas=1).spec, NOW)
    await sizer.size(service_of(replicas=5).spec, NOW + 1)

    assert reader.calls == 1


async def test_a_failure_is_returned_and_retried_soon(service_of: Any, model: Model) -> None:
    reader = Reader(model)
    reader.error = ModelSourceError("ModelUnreachable", "down", lasting=False)
    sizer = Sizer(reader.read)

    assert isinstance(await sizer.size(service_of().spec, NOW), SizingProblem)
    await sizer.size(service_of().spec, NOW + 5)
    assert reader.calls == 1

    reader.error = None
    assert isinstance(await sizer.size(service_of().spec, NOW + 16), Sized)


async def test_an_outage_of_the_hub_keeps_the_sizing(service_of: Any, model: Model) -> None:
    reader = Reader(model)
    sizer = Sizer(reader.read)
    await sizer.size(service_of().spec, NOW)
    reader.error = ModelSourceError("ModelUnreachable", "down", lasting=False)

    later = await sizer.size(service_of().spec, NOW + 10_000)

    assert reader.calls == 2
    assert isinstance(later, Sized)


async def test_a_model_that_became_unreadable_is_a_problem(service_of: Any, model: Model) -> None:
    reader = Reader(model)
    sizer = Sizer(reader.read)
    await sizer.size(service_of().spec, NOW)
    reader.error = ModelSourceError("ModelUnreadable", "a shard is missing")

    assert isinstance(await sizer.size(service_of().spec, NOW + 10_000), SizingProblem)


def test_an_encoder_is_sized_without_a_kv_cache(service_of: Any, encoder: Model) -> None:
    service: LLMService = service_of(engine={}, resources={"gpu": {"count": 0}, "requests": {"memory": "4Gi"}})

    answer = size(service.spec, encoder)

    assert isinstance(answer, Sized)
    assert (answer.plan.max_num_seqs, answer.plan.max_model_len, answer.plan.kv_pool_bytes) == (64, 512, 0)
    verdict = sizing_verdict(answer)
    assert (verdict.status, verdict.reason) == ("True", "Fits")
    assert "an encoder has no KV cache, a step holds 4 of 512 tokens" in verdict.message
    status = sizing_status(answer, measured_status(answer, 0, 2**28))
    assert status is not None
    assert (status.blocks, status.kv_bytes_per_token, status.kv_pool_gib) == (0, 0, 0)
    args = server_args(service, answer)
    assert "--kv-cache-memory" not in args, "which takes no 0"
    assert args[args.index("--memory-limit") + 1] == str(4 * 2**30)


def test_an_encoder_that_sized_itself_has_no_blocks(service_of: Any, encoder: Model) -> None:
    fields = {"max_num_seqs": 64, "max_model_len": 512, "block_size": 16, "num_blocks": 0}
    memory = {"weights": 2**28, "kv_cache": 0, "activations": 2**20, "graphs": 0, "total": 2**32}
    shape = encoder.shape.to_fields() if encoder.shape else None
    for known in (shape, None):
        report = parse_report(json.dumps({**fields, "memory_bytes": memory, "shape": known}).encode())
        model = replace(encoder, figures_from="pod", shape=report.shape)
        answer = size(service_of(engine={}).spec, model, report)
        assert isinstance(answer, Sized)
        status = sizing_status(answer, None)
        assert status is not None
        assert (status.max_num_seqs, status.blocks, status.kv_bytes_per_token) == (64, 0, 0)
