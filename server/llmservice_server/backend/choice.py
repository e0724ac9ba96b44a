"""Which backend computes a model, and why."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

import torch

from llmservice_server.backend.base import Backend
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.compile_cache import COMPILATIONS, Compilations
from llmservice_server.backend.torch.backend import TorchBackend
from llmservice_server.types.errors import ConfigError

if TYPE_CHECKING:
    from llmservice_server.backend.cuda.varlen import Choice

P = ParamSpec("P")
T = TypeVar("T")
_MOST_CPU_HEADS = 64
BackendName = Literal["cpu", "torch", "triton"]


def choose_backend(
    wanted: Literal["auto", "torch", "triton"],
    shape: KVCacheShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_num_batched_tokens: int,
    worth_compiling: bool = False,
    enforce_eager: bool = False,
) -> Backend:
    """The backend for activations of `dtype`. Raises ConfigError if the wanted one is unusable here.

    With `triton` the start fails where any of our kernels does; `auto` serves without it, and says so.
    `worth_compiling`: the model is large enough for CPU kernels that take seconds to compile. On a GPU
    `auto` times chunks of prompts by our kernel and by torch's, and uses the faster.
    """
    problem = None
    if wanted == "triton" or (wanted == "auto" and device.type == "cuda"):
        problem = _why_triton_is_unusable(shape, dtype, device)
    elif wanted == "auto":
        problem = _why_cpu_kernels_are_unusable(shape)
    name, reason = decide(wanted, device.type, problem)
    if shape.dtype.itemsize == 1 and name != "triton":
        raise ConfigError(
            f"kv_cache_dtype fp8 needs the attention backend triton, which is not used here ({reason}): "
            "choose another --kv-cache-dtype"
        )
    if name == "cpu":
        from llmservice_server.backend.cpu.backend import CpuBackend

        return CpuBackend(shape, device, reason, worth_compiling=worth_compiling)
    if name == "torch":
        return TorchBackend(shape, device, reason, fallbacks={"attention": problem} if problem else {})
    from llmservice_server.backend.cuda.backend import CudaBackend

    if wanted != "auto":
        return CudaBackend(shape, device, reason, enforce_eager=enforce_eager, may_fall_back=False)
    from llmservice_server.backend.cuda.varlen import OURS

    chunks = _choose_chunk_attention(shape, dtype, device, max_num_batched_tokens)
    return CudaBackend(
        shape,
        device,
        f"{reason}; chunks of prompts by {chunks.name}: {chunks.reason}",
        varlen_keys=0 if chunks.name == OURS else max_num_batched_tokens,
        enforce_eager=enforce_eager,
    )


def decide(
    wanted: Literal["auto", "torch", "triton"], device_type: str, problem: str | None
) -> tuple[BackendName, str]:
    """The backend and the reason for it. `problem`: why the device's kernels are unusable; None if they are usable."""
    if wanted == "torch":
        return "torch", "it was requested"
    if wanted == "triton":
        if problem is not None:
            raise ConfigError(f"attention is triton, which is unusable here: {problem}: use --attention auto")
        return "triton", "it was requested, and its kernels agreed with torch"
    if device_type == "cpu":
        if problem is not None:
            return "torch", f"the CPU kernels are unusable here: {problem}"
        return "cpu", "the kernels for this processor are the fastest on it"
    if problem is not None:
        return "torch", f"triton is unusable here: {problem}"
    return "triton", "its kernels compiled and agreed with torch on this GPU"


def _why_triton_is_unusable(shape: KVCacheShape, dtype: torch.dtype, device: torch.device) -> str | None:
    try:
        from llmservice_server.backend.cuda.backend import why_triton_is_unusable
    except ImportError as error:
        return f"it cannot be imported ({error})"
    if device.type != "cuda":
        return why_triton_is_unusable(shape, dtype, device)
    try:
        return in_child(why_triton_is_unusable, shape, dtype, device)
    except BrokenProcessPool:
        return "the process that checked its kernels was killed"


def _choose_chunk_attention(
    shape: KVCacheShape, dtype: torch.dtype, device: torch.device, max_num_batched_tokens: int
) -> Choice:
    from llmservice_server.backend.cuda.varlen import OURS, Choice, choose_chunk_attention

    if shape.sliding_heads is not None:
        return Choice(OURS, "layers differ in heads")
    if device.type != "cuda":
        return choose_chunk_attention(shape, dtype, device, max_num_batched_tokens)
    try:
        return in_child(choose_chunk_attention, shape, dtype, device, max_num_batched_tokens)
    except BrokenProcessPool:
        return Choice(OURS, "the process that timed them was killed")


def in_child(work: Callable[P, T], *arguments: P.args, **settings: P.kwargs) -> T:
    """`work` in a process of its own, as an illegal access to memory ends the CUDA context of the process it is in.

    Raises what `work` raises, and BrokenProcessPool if it kills its process. Compiled kernels stay in Triton's cache,
    and count as compiled by this process.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as child:
        result, compilations = child.submit(_counted, partial(work, *arguments, **settings)).result()
    COMPILATIONS.add(compilations)
    return result


def _counted(work: Callable[[], T]) -> tuple[T, Compilations]:
    return work(), COMPILATIONS


def _why_cpu_kernels_are_unusable(shape: KVCacheShape) -> str | None:
    group = max((kind.num_heads // kind.num_kv_heads for kind in shape.kinds()), default=1)
    if group > _MOST_CPU_HEADS:
        return f"{group} heads share a key head, with more than {_MOST_CPU_HEADS} they take minutes to compile"
    try:
        import llmservice_server.backend.cpu.backend  # noqa: F401 - numba may be missing
    except ImportError as error:
        return f"they cannot be imported ({error})"
    return None
