"""The explanation of a plan: a line `label: text` per step of the arithmetic, with its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from llmservice_planner.model.quantization import WeightFormat
from llmservice_planner.model.shape import DTYPE_BYTES, KV_SCALE_BYTES, ModelShape
from llmservice_planner.sizing.budget import NULL_BLOCKS, Budget
from llmservice_planner.sizing.gpu import CPU, GIB, GPU, has_fp8
from llmservice_planner.sizing.latency import LatencyModel
from llmservice_planner.sizing.overhead import OverheadTerm
from llmservice_planner.sizing.request import LimitedBy, SizingRequest


def explain(
    budget: Budget,
    overhead: tuple[OverheadTerm, ...],
    max_num_seqs: int,
    bounds: Mapping[LimitedBy, int],
    limited_by: LimitedBy,
) -> tuple[str, ...]:
    """The lines shown by `llmservice plan`, `status.sizing.explanation` and `llmservice explain`."""
    if budget.request.shape.is_encoder:
        return (*budget.request.notes, *_encoder(budget, overhead, max_num_seqs, limited_by))
    lines = [*budget.request.notes, _model(budget), _weights(budget), _kv(budget), _memory(budget), _step(budget)]
    lines += _overhead(overhead)
    lines += _pool(budget, overhead, max_num_seqs)
    lines += _sequences(budget, max_num_seqs)
    if budget.fits:
        lines += _speed(budget, max_num_seqs)
        lines += _answer(budget, max_num_seqs, bounds, limited_by)
    else:
        lines.append(f"answer: does not fit, {format_bytes(budget.shortfall_bytes)} are missing")
    return tuple(lines)


def _encoder(
    budget: Budget, overhead: tuple[OverheadTerm, ...], max_num_seqs: int, limited_by: LimitedBy
) -> Iterator[str]:
    shape, length = budget.request.shape, budget.request.model_len
    size = f"{shape.layers} layers, hidden {shape.hidden_size}, {shape.heads} heads"
    yield f"model: {shape.architecture}, an encoder of {size}: it has no KV cache"
    yield _weights(budget)
    yield _memory(budget)
    yield f"step: {budget.step.total} tokens of all inputs together, {budget.step.reason}"
    yield from _overhead(overhead)
    if not budget.fits:
        yield f"answer: does not fit, {format_bytes(budget.shortfall_bytes)} are missing"
        return
    yield f"guaranteed: {budget.sequences(length, max_num_seqs)} inputs of {length} tokens in a step"
    yield f"answer: {max_num_seqs} inputs in a batch, limited by {limited_by}"


def format_bytes(count: int) -> str:
    """A size in GiB, MiB or KiB, with two decimals."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _model(budget: Budget) -> str:
    shape = budget.request.shape
    text = f"model: {shape.architecture}, {shape.layers} layers, hidden {shape.hidden_size}, {shape.heads} heads"
    text += "" if shape.is_mla else f" over {shape.kv_heads} KV heads of {shape.head_dim}"
    if shape.num_experts:
        active = f", {shape.active_parameters / 1e9:.2f} billion active"
        return f"{text}, {shape.experts_per_token} of {shape.num_experts} experts a token{active}"
    return text


def _weights(budget: Budget) -> str:
    request, dtype = budget.request, budget.request.resolved_dtype
    size = format_bytes(budget.weights_bytes)
    head = ""
    if request.packs_tied_head:
        head_bytes = request.shape.head_bytes(dtype, request.quantization, on_cpu=request.on_cpu)
        head = f" + {format_bytes(head_bytes)} of the tied output head, packed"
    if request.weights_bytes is not None:
        return f"weights: {size}, read from the checkpoint's headers{head and f' ({head[3:]} included)'}"
    count = request.shape.num_parameters / 1e9
    if held := _held(request):
        return f"weights: {count:.3f} billion parameters, {held}{head} = {size}"
    return f"weights: {count:.3f} billion parameters x {DTYPE_BYTES[dtype]} bytes ({dtype}){head} = {size}"


def _held(request: SizingRequest) -> str | None:
    """How the matrices are held in memory; None if as those of a checkpoint that is not quantised."""
    dtype, code = request.resolved_dtype, request.shape.quantization
    if code is None:
        return f"matrices quantised to int8, the rest in {dtype}" if request.quantization == "int8" else None
    form = WeightFormat.parse(code)
    held = form.held_as(request.quantization, on_cpu=request.on_cpu)
    if held == "dense":
        return f"of {form}, held in {dtype}"
    return f"matrices of {form}{' as int8' if held == 'int8' else ''}, the rest in {dtype}"


def _kv(budget: Budget) -> str:
    request, shape = budget.request, budget.request.shape
    dtype, device_count = request.resolved_kv_dtype, request.device_count
    if shape.is_mla:
        copies = f" x {device_count} GPUs (every GPU keeps the latent)" if device_count > 1 else ""
        elements = f"({shape.kv_lora_rank} latent + {shape.qk_rope_head_dim} rope)"
        formula = f"{shape.layers} layers x {_row(elements, dtype)}{copies}"
    else:
        formula = f"2 x {_kv_heads(shape, dtype, device_count)}"
    return f"kv per token: {formula} = {format_bytes(budget.kv_bytes_per_token)}"


def _kv_heads(shape: ModelShape, dtype: str, device_count: int) -> str:
    kinds: Counter[tuple[int, int]] = Counter()
    for layers, kv_heads, head_dim in shape.kv_heads_by_kind:
        kinds[kv_heads, head_dim] += layers
    terms = []
    for (kv_heads, head_dim), layers in kinds.items():
        heads = device_count * max(1, kv_heads // device_count)
        repeated = f" ({kv_heads} repeated over {device_count} GPUs)" if heads > kv_heads else ""
        if layers:
            terms.append(f"{layers} layers x {heads} KV heads{repeated} x {_row(str(head_dim), dtype)}")
    return terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"


def _row(numbers: str, dtype: str) -> str:
    if dtype == "fp8":
        return f"({numbers} x 1 byte (fp8) + {KV_SCALE_BYTES} bytes of scale)"
    return f"{numbers} x {DTYPE_BYTES[dtype]} bytes ({dtype})"


def _memory(budget: Budget) -> str:
    request = budget.request
    device, share = request.device, request.gpu_memory_utilization
    name = "container" if isinstance(device, CPU) else f"{request.device_count} x {device.name}"
    return (
        f"memory: {name}, {format_bytes(device.memory_bytes)} seen by a process, "
        f"{share:.0%} of it usable = {format_bytes(budget.usable_bytes)}"
    )


def _step(budget: Budget) -> str:
    step = budget.step
    return f"step: {step.total} tokens, {step.chunk} of one prompt while others wait, {step.reason}"


def _overhead(overhead: tuple[OverheadTerm, ...]) -> Iterator[str]:
    for term in overhead:
        yield f"overhead: {term.name} = {format_bytes(term.total_bytes)}"


def _pool(budget: Budget, overhead: tuple[OverheadTerm, ...], max_num_seqs: int) -> Iterator[str]:
    spent = sum(term.total_bytes for term in overhead)
    left = budget.usable_bytes - budget.weights_bytes - spent
    yield (
        f"kv pool: {format_bytes(budget.usable_bytes)} - {format_bytes(budget.weights_bytes)} weights "
        f"- {format_bytes(spent)} overhead = {format_bytes(left)}"
    )
    blocks = budget.pool_bytes(max_num_seqs) // budget.block_bytes
    groups = budget.groups
    tokens = max(0, blocks - NULL_BLOCKS) * groups.block_size // len(groups)
    of_each = f"of {groups.block_size} tokens"
    if len(groups) > 1:
        of_each = f"{of_each} in one of {len(groups)} groups of {groups.num_layers} layers"
    yield (
        f"blocks: {blocks} {of_each} ({format_bytes(budget.block_bytes)} each), "
        f"one of them the null block: room for {tokens} tokens{', or more as windows slide' if groups.slides else ''}"
    )


def _sequences(budget: Budget, max_num_seqs: int) -> Iterator[str]:
    request = budget.request
    for label, tokens in (("guaranteed", request.model_len), ("expected", request.typical_tokens)):
        blocks = budget.groups.blocks(tokens)
        yield (
            f"{label}: {budget.sequences(tokens, max_num_seqs)} sequences of {tokens} tokens{_sliding(request)} fit, "
            f"each {blocks} blocks, {format_bytes(blocks * budget.block_bytes)}"
        )


def _sliding(request: SizingRequest) -> str:
    shape = request.shape
    if shape.sliding_window is None:
        return ""
    return f", {shape.sliding_layers} of {shape.layers} layers slide over {shape.sliding_window} tokens"


def _speed(budget: Budget, max_num_seqs: int) -> Iterator[str]:
    latency, request = budget.latency, budget.request
    if latency is None:
        yield f"speed: the rates of {request.device.name} are not known, so latency bounds nothing"
        return
    alone, full = (budget.decode_step_s(size) or 0.0 for size in (1, max_num_seqs))
    yield (
        f"speed: a decode step takes {_ms(alone)} for one sequence, {_ms(full)} for {max_num_seqs} "
        f"({max_num_seqs / full:.0f} tokens/s in all); the ridge is at {latency.ridge_tokens}"
    )
    if request.itl_p99_s is not None:
        yield from _itl_target(latency, request.itl_p99_s, alone, budget.step.total)


def _itl_target(latency: LatencyModel, target_s: float, alone_s: float, budget_tokens: int) -> Iterator[str]:
    if alone_s > target_s:
        yield f"target: even alone a sequence misses {_ms(target_s)} a token: use faster or more GPUs"
        return
    chunk_s = latency.prefill_s(budget_tokens)
    if chunk_s > target_s:
        yield (
            f"target: a step that carries a full chunk of {budget_tokens} prompt tokens takes {_ms(chunk_s)}, "
            f"past {_ms(target_s)}: lower max_num_batched_tokens to {latency.longest_prefill(target_s, budget_tokens)}"
        )


def _answer(budget: Budget, max_num_seqs: int, bounds: Mapping[LimitedBy, int], limited_by: LimitedBy) -> Iterator[str]:
    others = ", ".join(f"{name} {bound}" for name, bound in sorted(bounds.items(), key=lambda item: item[1]))
    yield f"bounds: {others}"
    memory = bounds["kvMemory"]
    if limited_by == "maxNumSeqs" and max_num_seqs > memory:
        yield (
            f"caution: only {memory} sequences fit at once even if each has {budget.request.least_sequence_tokens} "
            "tokens; others wait"
        )
    device = budget.request.device
    if isinstance(device, GPU) and not device.supports_bf16 and budget.request.resolved_dtype == "bfloat16":
        yield f"caution: {device.name} has no bfloat16 units: use dtype float16"
    if budget.request.kv_dtype == "fp8" and not has_fp8(device):
        yield f"caution: {device.name} has no fp8 units, and the server does not start: use kv_dtype auto"
    if budget.request.device_count > 1:
        yield "caution: not yet servable, as the server runs on one GPU"
    yield f"answer: max_num_seqs {max_num_seqs}, limited by {limited_by}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
