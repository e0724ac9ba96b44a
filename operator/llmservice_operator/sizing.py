"""From a spec and a model's figures to the engine's numbers: by the planner, or by a server that sizes itself.

Problems are returned as values with a reason and a remedy.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from llmservice_operator.api import units
from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.api.spec import LLMServiceSpec
from llmservice_operator.locations import Figures, Model, ModelSourceError
from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.model.shape import ModelShape, ShapeError
from llmservice_planner.sizing.explanation import format_bytes
from llmservice_planner.sizing.gpu import CPU, GPU, UnknownGPU, find_gpu, has_fp8
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_planner.sizing.plan import LimitedBy, Plan, SizingError, SizingRequest, plan
from llmservice_planner.sizing.workload import for_workload

GIB = 2**30

_NOT_SERVED = "--gpu-count"
"""The planner's remedy that the server does not support."""
_MIG_DEVICE = re.compile(r"/mig-(?P<slices>[1-7])g\.")
"""Slices, of seven, of a GPU's multiprocessors; its memory and bandwidth come in eighths (NVIDIA's MIG guide)."""
_KEEP_S = 600.0
"""A checkpoint rarely changes under its name; a changed spec is sized at once."""
_RETRY_S = 15.0


@dataclass(frozen=True, slots=True)
class SizingReport:
    """The numbers of a server that sized itself, from its GET /sizing."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    """Usable ones, without the null block."""
    weights_bytes: int
    kv_cache_bytes: int
    activations_bytes: int
    """Those of CUDA graphs included."""
    shape: ModelShape | None
    """None: a model that the planner does not know."""
    block_groups: int = 1
    """Of layers: a sequence takes blocks for each of them."""


def parse_report(text: bytes) -> SizingReport:
    """Raises ValueError for anything but a server's answer."""
    try:
        report: dict[str, Any] = json.loads(text)
        memory = report["memory_bytes"]
        return SizingReport(
            max_num_seqs=int(report["max_num_seqs"]),
            max_model_len=int(report["max_model_len"]),
            block_size=int(report["block_size"]),
            num_blocks=int(report["num_blocks"]),
            block_groups=max(1, int(report.get("block_groups", 1))),
            weights_bytes=int(memory["weights"]),
            kv_cache_bytes=int(memory["kv_cache"]),
            activations_bytes=int(memory["activations"]) + int(memory.get("graphs", 0)),
            shape=ModelShape.from_fields(report["shape"]) if report.get("shape") else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no answer of llmservice serve: {type(error).__name__} {error}") from error


@dataclass(frozen=True, slots=True)
class Given:
    """What the pods of a Deployment were given."""

    max_num_seqs: int
    limited_by: LimitedBy
    predicted: int
    """What the planner chose."""
    settings: str
    """The digest of what the KV blocks depend on: those measured with other settings say nothing."""
    blocks: int | None = None
    """The measured blocks that `max_num_seqs` comes from; None: it is the predicted one."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A service that fits: its model's location, and the engine's numbers."""

    model: Model
    device: GPU | CPU
    plan: Plan | None
    """None: the model's figures are known to the server alone, or the planner can't size that model."""
    max_num_seqs: int | None
    """None: no server has reported yet."""
    notes: tuple[str, ...] = ()
    """Which figures were chosen before the planner was called; shown above its working."""
    report: SizingReport | None = None
    """Of a server that sized itself."""
    latency: LatencyModel | None = None
    """None where the device's rates or the model's figures are unknown."""
    expected_tokens: int | None = None
    """For the server's flag, as the workload chooses; None: as the spec says, or the server's default."""
    given: Given | None = None
    """None: the plan's numbers are the predicted ones."""

    @property
    def block_groups(self) -> BlockGroups | None:
        """None where there is no plan, or no KV cache."""
        if self.plan is None or self.model.shape is None or not self.plan.kv_bytes_per_token:
            return None
        return self.model.shape.block_groups(self.plan.block_size, self.plan.max_num_batched_tokens)

    @property
    def self_sized(self) -> bool:
        """Whether the server sizes itself. It does so for good: passing it the numbers later would restart it."""
        return self.model.figures_from == "pod"


@dataclass(frozen=True, slots=True)
class SizingProblem:
    """Why no pod is started, and what to change."""

    reason: str
    message: str


def size(spec: LLMServiceSpec, model: Model, report: SizingReport | None = None) -> Sized | SizingProblem:
    """The engine's numbers for `spec`, or the reason why there are none. `report`: of a server that sized itself."""
    if problem := _unserved(spec, model.shape):
        return problem
    try:
        device = device_of(spec)
        _check_fp8(spec, device)
        if model.shape is None or model.figures_from == "pod":
            return _self_sized(spec, model, device, report)
        request = sizing_request(spec, model, model.shape, device)
        answer = plan(request)
    except UnknownGPU as error:
        return SizingProblem("UnknownGPU", f"resources.gpu.product: {error}")
    except (ShapeError, SizingError) as error:
        return SizingProblem("InvalidSizing", str(error))
    if not answer.fits:
        return SizingProblem("DoesNotFit", _does_not_fit(answer))
    return Sized(
        model,
        device,
        answer,
        answer.max_num_seqs,
        _notes(spec),
        latency=_latency(request, answer),
        expected_tokens=request.expected_tokens,
    )


def _self_sized(spec: LLMServiceSpec, model: Model, device: GPU | CPU, report: SizingReport | None) -> Sized:
    """The server decides; the planner's prediction is shown beside it once the figures are known."""
    answer = latency = None
    if model.shape is not None:
        with contextlib.suppress(ShapeError, SizingError):
            request = sizing_request(spec, model, model.shape, device)
            answer = plan(request)
            latency = _latency(request, answer)
    given = None if spec.engine.max_num_seqs == "auto" else spec.engine.max_num_seqs
    notes = _notes(spec)
    if spec.workload is not None:
        notes = (
            *notes,
            f"workload: {spec.workload} chooses only the lane, as the server sizes itself: set model.shape",
        )
    seqs = report.max_num_seqs if report else given
    return Sized(model, device, answer, seqs, notes, report, latency)


def _latency(request: SizingRequest, answer: Plan) -> LatencyModel | None:
    return LatencyModel.of(
        request.shape,
        request.device,
        request.device_count,
        request.resolved_dtype,
        answer.weights_bytes,
        answer.kv_bytes_per_token,
        request.quantization,
    )


def _check_fp8(spec: LLMServiceSpec, device: GPU | CPU) -> None:
    if spec.engine.kv_cache_dtype == "fp8" and not has_fp8(device):
        raise SizingError(
            f"engine.kvCacheDtype is fp8, for which {device.name} has no arithmetic: choose another type, or a GPU that"
            " has it (l4, l40s, h100-80gb, …)"
        )


def device_of(spec: LLMServiceSpec) -> GPU | CPU:
    """What one replica computes on; raises UnknownGPU."""
    gpu = spec.resources.gpu
    if gpu is None or gpu.count == 0:
        return CPU(units.whole_bytes(spec.resources.requests.memory))
    known = find_gpu(gpu.product or "")
    if not gpu.memory_gib:
        return known
    memory = min(known.memory_bytes, int(gpu.memory_gib * GIB))
    if not (mig := _MIG_DEVICE.search(gpu.resource_name or "")):
        return replace(known, memory_bytes=memory)
    return replace(
        known,
        memory_bytes=memory,
        bandwidth_bytes_per_s=_part(known.bandwidth_bytes_per_s, memory / known.memory_bytes),
        flops_16bit=_part(known.flops_16bit, int(mig["slices"]) / 7),
        flops_fp8=_part(known.flops_fp8, int(mig["slices"]) / 7),
    )


def _part(rate: float | None, share: float) -> float | None:
    return None if rate is None else rate * share


def _notes(spec: LLMServiceSpec) -> tuple[str, ...]:
    """Which of two figures for the GPU's memory is used: the smaller is the safe one."""
    gpu = spec.resources.gpu
    if gpu is None or gpu.count == 0 or not gpu.memory_gib:
        return ()
    known_gib = find_gpu(gpu.product or "").memory_bytes / GIB
    given, known = f"gpu.memoryGiB: {gpu.memory_gib:g}", f"the {known_gib:.2f} GiB that a process sees of {gpu.product}"
    if gpu.memory_gib < known_gib:
        return (f"{given} is taken, it is less than {known}",)
    return (f"{given} is not taken, it is more than {known}",)


def sizing_request(spec: LLMServiceSpec, model: Model, shape: ModelShape, device: GPU | CPU) -> SizingRequest:
    """The planner's request with the spec's figures; raises SizingError where they contradict each other."""
    engine = spec.engine
    is_counted = shape.quantization or (spec.model.quantization == "int8" and not shape.why_not_counted)
    request = SizingRequest(
        shape=shape,
        device=device,
        device_count=1,
        max_model_len=engine.max_model_len,
        dtype=spec.model.dtype,
        kv_dtype=engine.kv_cache_dtype,
        quantization=spec.model.quantization,
        block_size=engine.block_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        expected_tokens=engine.sizing.expected_tokens,
        max_num_seqs=None if engine.max_num_seqs == "auto" else engine.max_num_seqs,
        max_loras=spec.max_loras,
        max_lora_rank=engine.max_lora_rank,
        lora_experts=engine.lora_experts,
        itl_p99_s=spec.slo.itl_p99_s,
        weights_bytes=None if is_counted else model.weights_bytes,
    )
    # A server that sizes itself has its own defaults, and the prediction beside them is made for those.
    return request if model.figures_from == "pod" else for_workload(request, spec.workload)


def _unserved(spec: LLMServiceSpec, shape: ModelShape | None) -> SizingProblem | None:
    """The planner can size more than the server can run."""
    gpu = spec.resources.gpu
    if gpu is not None and gpu.count > 1:
        return SizingProblem(
            "Unsupported",
            f"resources.gpu.count is {gpu.count}, but one replica runs on one GPU so far:"
            " set it to 1 and choose a GPU that holds the whole model (`llmservice plan --gpu …` compares them)",
        )
    if shape is None:
        return None
    if shape.quantization and shape.is_encoder:
        return SizingProblem(
            "UnsupportedModel",
            f"the checkpoint is quantised ({shape.quantization}), which the server loads for models that generate, not"
            f" for encoders ({shape.architecture}): choose the unquantised checkpoint",
        )
    return None


def _does_not_fit(answer: Plan) -> str:
    possible = [text for text in answer.remedies if _NOT_SERVED not in text]
    remedies = " ".join(f"({number}) {text}" for number, text in enumerate(possible, start=1))
    missing = f"{format_bytes(answer.shortfall_bytes)} are missing for one sequence of {answer.max_model_len} tokens"
    beside = (
        f"beside {format_bytes(answer.weights_bytes)} of weights and {format_bytes(answer.overhead_bytes)} of overhead"
    )
    return f"the model does not fit: {missing}, {beside}. What would help: {remedies or 'a GPU with more memory'}"


ReadModel = Callable[[ModelSource, Figures | None], Coroutine[Any, Any, Model]]
Question = tuple[str, Figures | None, SizingReport | None]
"""What is sized: the parts of the spec that matter, the known figures and the server's report."""


class Sizer:
    """Sizes one service, and caches the answer: a model is not read in every pass, and soon again after a failure."""

    def __init__(self, read_model: ReadModel) -> None:
        self._read_model = read_model
        self._cached: tuple[Question, Sized | SizingProblem, float] | None = None
        """The answer, and until when it is kept."""

    async def size(
        self, spec: LLMServiceSpec, now: float, known: Figures | None = None, report: SizingReport | None = None
    ) -> Sized | SizingProblem:
        """Size `spec`; a model that can't be read for the moment keeps its previous answer.

        `known` are the figures that the status kept, `report` is of a server that sized itself.
        """
        parts = spec.model_dump_json(include={"model", "resources", "engine", "slo", "workload"})
        question = (f"{parts} {spec.max_loras}", known, report)
        before = None
        if self._cached is not None and self._cached[0] == question:
            _, before, until_s = self._cached
            if now < until_s:
                return before
        lasting = True
        try:
            model = await self._read_model(spec.model, known)
        except ModelSourceError as error:
            answer: Sized | SizingProblem = SizingProblem(error.reason, str(error))
            lasting = error.lasting
        else:
            if model.figures_from == "pod" and report is not None and report.shape is not None:
                model = replace(model, shape=report.shape)
            answer = size(spec, model, report)
        if not lasting and isinstance(before, Sized):
            answer = before
        keep_s = _KEEP_S if isinstance(answer, Sized) and lasting else _RETRY_S
        self._cached = (question, answer, now + keep_s)
        return answer
