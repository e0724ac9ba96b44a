"""From a spec and a model's figures to the engine's numbers: the planner is asked, problems come back as values."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from llmservice_operator.api import duration, quantity
from llmservice_operator.api.spec import LLMServiceSpec
from llmservice_operator.api.status import MeasuredStatus, SizingStatus
from llmservice_operator.models.source import Model
from llmservice_operator.sizing.sizing_report import SERVER, SizingReport, reported_sizing
from llmservice_planner.explanation import format_bytes
from llmservice_planner.gpu import CPU, GPU, UnknownGPU, cpu_device, find_gpu
from llmservice_planner.shape import ModelShape, ShapeError
from llmservice_planner.sizing import Plan, SizingError, SizingRequest, plan

GIB = 2**30
SERVED_ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""What the inference server runs; the planner knows more families than that."""

_NOT_SERVED = ("fp8", "--gpu-count")
"""Remedies of the planner's that the server can't follow so far."""

_EXPLANATION_LIMIT = 8192


@dataclass(frozen=True, slots=True)
class Sized:
    """A service that fits: where the model is, what the engine is told."""

    model: Model
    device: GPU | CPU
    plan: Plan | None
    """None: only the server knows the model's figures so far, or none but it can size that model."""
    max_num_seqs: int | None
    """None: no server has told yet."""
    notes: tuple[str, ...] = ()
    """What was made of the spec before the planner was asked; shown above its working."""
    report: SizingReport | None = None
    """Of a server that sized itself."""

    @property
    def self_sized(self) -> bool:
        """Whether the server sizes itself. It stays so once it is known how: to tell it now would restart it."""
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
        if model.shape is None or model.figures_from == "pod":
            return _self_sized(spec, model, device, report)
        answer = plan(sizing_request(spec, model, model.shape, device))
    except UnknownGPU as error:
        return SizingProblem("UnknownGPU", f"resources.gpu.product: {error}")
    except (ShapeError, SizingError) as error:
        return SizingProblem("InvalidSizing", str(error))
    if not answer.fits:
        return SizingProblem("DoesNotFit", _does_not_fit(answer))
    return Sized(model, device, answer, answer.max_num_seqs, _notes(spec))


def _self_sized(spec: LLMServiceSpec, model: Model, device: GPU | CPU, report: SizingReport | None) -> Sized:
    """The server decides; the planner's word stands beside it once the figures are known."""
    answer = None
    if model.shape is not None:
        with contextlib.suppress(ShapeError, SizingError):
            answer = plan(sizing_request(spec, model, model.shape, device))
    given = None if spec.engine.max_num_seqs == "auto" else spec.engine.max_num_seqs
    return Sized(model, device, answer, report.max_num_seqs if report else given, _notes(spec), report)


def device_of(spec: LLMServiceSpec) -> GPU | CPU:
    """What one replica computes on; raises UnknownGPU."""
    gpu = spec.resources.gpu
    if gpu is None or gpu.count == 0:
        return cpu_device(quantity.whole_bytes(spec.resources.requests.memory))
    card = find_gpu(gpu.product or "")
    return with_memory(card, gpu.memory_gib) if gpu.memory_gib else card


def with_memory(card: GPU, memory_gib: float) -> GPU:
    """The same card with the memory that the user says it has, where that is less: a slice, or others use the rest."""
    return replace(card, memory_bytes=min(card.memory_bytes, int(memory_gib * GIB)))


def _notes(spec: LLMServiceSpec) -> tuple[str, ...]:
    """Which of two figures for the card's memory was taken: the smaller is the safe one."""
    gpu = spec.resources.gpu
    if gpu is None or gpu.count == 0 or not gpu.memory_gib:
        return ()
    known_gib = find_gpu(gpu.product or "").memory_bytes / GIB
    given, known = f"gpu.memoryGiB: {gpu.memory_gib:g}", f"the {known_gib:.2f} GiB that a process sees of {gpu.product}"
    if gpu.memory_gib < known_gib:
        return (f"{given} is taken, it is less than {known}",)
    return (f"{given} is not taken, it is more than {known}",)


def sizing_request(spec: LLMServiceSpec, model: Model, shape: ModelShape, device: GPU | CPU) -> SizingRequest:
    """The planner's question in the spec's figures; raises SizingError where they contradict each other."""
    engine = spec.engine
    return SizingRequest(
        shape=shape,
        device=device,
        device_count=1,
        max_model_len=engine.max_model_len,
        dtype=spec.model.dtype,
        kv_dtype=engine.kv_cache_dtype,
        block_size=engine.block_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        policy=engine.sizing.policy,
        expected_tokens=engine.sizing.expected_tokens,
        max_num_seqs=None if engine.max_num_seqs == "auto" else engine.max_num_seqs,
        itl_p99_s=duration.seconds(spec.slo.itl_p99) if spec.slo.itl_p99 else None,
        frees_slid_blocks=False,  # the server keeps a sequence's blocks to its end
        weights_bytes=model.weights_bytes,
    )


def sizing_status(sized: Sized, measured: MeasuredStatus | None) -> SizingStatus | None:
    """`status.sizing`: the prediction with its working, and beside it what a server measured; None before either."""
    answer, report = sized.plan, sized.report
    if sized.self_sized and report is None:
        return None
    if answer is None:
        return None if report is None else reported_sizing(report)
    return SizingStatus(
        source="pod" if report else "operator",
        max_num_seqs=report.max_num_seqs if report else answer.max_num_seqs,
        max_model_len=report.max_model_len if report else answer.max_model_len,
        kv_bytes_per_token=answer.kv_bytes_per_token,
        weights_gib=_gib(answer.weights_bytes),
        overhead_gib=_gib(answer.overhead_bytes),
        kv_pool_gib=_gib(answer.kv_pool_bytes),
        blocks=answer.num_blocks,
        limited_by=SERVER if report else answer.limited_by,
        measured=measured,
        explanation="\n".join([*sized.notes, *answer.explanation])[:_EXPLANATION_LIMIT],
    )


def measure(sized: Sized, blocks: int, weights_bytes: float | None) -> MeasuredStatus:
    """What a running server reports, against what it was told. `blocks` leaves the null block out.

    A server that sized itself was told nothing: it bounds its pool by what its sequences can use, and by what it
    measured, so that a difference says nothing about the prediction.
    """
    predicted = None if sized.self_sized or sized.plan is None else max(0, sized.plan.num_blocks - 1)
    return MeasuredStatus(
        blocks=blocks,
        weights_gib=None if weights_bytes is None else _gib(weights_bytes),
        error_percent=None if predicted is None or not blocks else round((predicted - blocks) / blocks * 100, 1),
    )


def _unserved(spec: LLMServiceSpec, shape: ModelShape | None) -> SizingProblem | None:
    """The planner can size more than the server can run."""
    gpu = spec.resources.gpu
    if gpu is not None and gpu.count > 1:
        return SizingProblem(
            "Unsupported",
            f"resources.gpu.count is {gpu.count}, but one replica runs on one card so far:"
            " set it to 1 and choose a card that holds the whole model (`llmservice plan --gpu …` compares them)",
        )
    if shape is None:
        return None
    if shape.architecture not in SERVED_ARCHITECTURES:
        return SizingProblem(
            "UnsupportedModel",
            f"the model's architecture is {shape.architecture}, the server runs"
            f" {', '.join(sorted(SERVED_ARCHITECTURES))}: choose a model of one of these families",
        )
    if shape.quantization:
        return SizingProblem(
            "UnsupportedModel",
            f"the checkpoint is quantised ({shape.quantization}), the server loads"
            " float32, bfloat16 and float16: choose the unquantised checkpoint",
        )
    return None


def _does_not_fit(answer: Plan) -> str:
    possible = [text for text in answer.remedies if not any(word in text for word in _NOT_SERVED)]
    remedies = " ".join(f"({number}) {text}" for number, text in enumerate(possible, start=1))
    missing = f"{format_bytes(answer.shortfall_bytes)} are missing for one sequence of {answer.max_model_len} tokens"
    beside = (
        f"beside {format_bytes(answer.weights_bytes)} of weights and {format_bytes(answer.overhead_bytes)} of overhead"
    )
    return f"the model does not fit: {missing}, {beside}. What would help: {remedies or 'a card with more memory'}"


def _gib(number_of_bytes: float) -> float:
    return round(number_of_bytes / GIB, 2)
