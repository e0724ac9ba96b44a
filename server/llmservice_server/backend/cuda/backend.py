"""The backend for NVIDIA GPUs: Triton kernels, and CUDA graphs of decode steps."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from llmservice_server.backend.agreement import BOUNDS, MIXED, Case, why_wrong
from llmservice_server.backend.base import Attention, DecodePath, Decoder, Model
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda import decode_graphs
from llmservice_server.backend.cuda.attention import TritonAttention
from llmservice_server.backend.cuda.experts import CudaExperts
from llmservice_server.backend.cuda.kernels.jit import FP8, INTERPRETED
from llmservice_server.backend.cuda.kernels.layer_ops import add_rms_norm, silu_mul
from llmservice_server.backend.cuda.kernels.products import can_multiply
from llmservice_server.backend.cuda.kernels.sampling import invert as invert_kernel
from llmservice_server.backend.cuda.kernels.sampling import top_k_top_p as top_k_top_p_kernel
from llmservice_server.backend.cuda.linear import MOST_ROWS, CudaQuantizedLinear
from llmservice_server.backend.cuda.varlen import Varlen, by_torch
from llmservice_server.backend.experts import Experts
from llmservice_server.backend.grouped import GroupedAttention, by_group
from llmservice_server.backend.layers import Activation, Linear
from llmservice_server.backend.quantized import QuantizedLinear, QuantizedWeight
from llmservice_server.backend.sampling_batch import SamplingBatch
from llmservice_server.backend.torch import sampler
from llmservice_server.backend.torch.backend import TorchBackend
from llmservice_server.backend.torch.layer_ops import TorchLayerOps
from llmservice_server.backend.torch.sampler import Invert, TopKTopP, invert, top_k_top_p
from llmservice_server.types.errors import ConfigError, first_line
from llmservice_server.types.messages import Fallback

_LOG = logging.getLogger(__name__)

_MANY_DECODES = ((17, 1),) * 640  # more than any GPU splits among its processors
_FP8_CAPABILITY = (8, 9)
_MOST_HEAD_DIM = 576  # of latents and their positions in DeepSeek's models


class TritonLayerOps(TorchLayerOps):
    """Implements `LayerOps` on a GPU, one kernel each."""

    def __init__(self) -> None:
        self.add_norm = add_rms_norm  # type: ignore[method-assign]

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        return silu_mul(gate_up) if activation == "silu" else super().gated(gate_up, activation)


@dataclass(slots=True)
class CudaBackend(TorchBackend):
    """`varlen_keys`: chunks of steps with at most this many keys are computed by torch's `varlen_attn`.

    Where a kernel fails its check and the backend may not fall back, preparing it raises ConfigError.
    """

    name: str = "triton"
    varlen_keys: int = 0
    enforce_eager: bool = False
    may_fall_back: bool = True
    _sampling: tuple[TopKTopP, Invert] = (top_k_top_p, invert)

    def keeps(self, weight: QuantizedWeight) -> bool:
        if weight.values.dtype == FP8 and self.on_gpu and not _has_fp8(self.device):
            return False
        return can_multiply(weight)

    def prepare(self, model: Model) -> None:
        model.ops = TritonLayerOps()
        self._multiply_experts(model)
        self._multiply_quantized(model)
        problem = why_unusable(top_k_top_p_kernel, invert_kernel, model.config.vocab_size, self.device)
        if problem is None:
            self._sampling = top_k_top_p_kernel, invert_kernel
        else:
            self._fall_back("top_k_top_p", f"our kernels for sampling are unusable here: {problem}")

    def _multiply_quantized(self, model: Model) -> None:
        """With our product, if it is right for the first of each size; else with torch's, which is slow."""
        problems: dict[tuple[int, int], str | None] = {}

        def converted(linear: Linear) -> Linear:
            if not isinstance(linear, QuantizedLinear) or not can_multiply(linear.quantized):
                return linear
            product, shape = CudaQuantizedLinear.of(linear), linear.quantized.shape
            if shape not in problems:
                problems[shape] = _why_wrong(product, linear)
            return product if problems[shape] is None else linear

        model.map_linears(converted)
        if problem := next((each for each in problems.values() if each is not None), None):
            self._fall_back("quantized_product", f"our product of quantised weights is unusable here: {problem}")

    def _multiply_experts(self, model: Model) -> None:
        """With our product of all experts, if it is right for those of the first layer."""
        checked = False
        for mixture in model.mixtures():
            if (product := CudaExperts.of(mixture.experts)) is None:
                continue
            if not checked and (problem := _why_experts_are_wrong(product, mixture.experts, model)) is not None:
                self._fall_back("grouped_product", f"our product of experts is unusable here: {problem}")
                return
            checked, mixture.experts = True, product

    def attention(self, num_blocks: int) -> Attention:
        varlen = Varlen(by_torch, self.varlen_keys) if self.varlen_keys else None
        return by_group(self.shape, lambda shape: TritonAttention(shape, num_blocks, self.device, varlen))

    @property
    def _captures(self) -> bool:
        return self.on_gpu and not self.enforce_eager  # Triton's interpreter has no graphs

    def decode_path(
        self, model: Model, attention: Attention, *, max_num_seqs: int, max_model_len: int
    ) -> DecodePath | None:
        if not self._captures or not isinstance(attention, TritonAttention | GroupedAttention):
            return None
        graphs = decode_graphs.capture_graphs(model, attention, max_num_seqs, max_model_len)
        if not isinstance(graphs, str):
            return graphs
        problem = f"CUDA graphs of steps are unusable here: {graphs}"
        if isinstance(model, Decoder):
            self._fall_back("decode_graphs", problem)
        else:  # other code may wait for the device, which no graph can hold: that is no fault of a kernel
            _LOG.info("steps are launched kernel by kernel: %s", problem)
        return None

    def _fall_back(self, part: Fallback, problem: str) -> None:
        if not self.may_fall_back:
            raise ConfigError(f"attention is triton, but {problem}: use --attention auto to serve without")
        _LOG.warning("torch computes instead, more slowly: %s", problem)
        self.fallbacks[part] = problem

    def decode_path_bytes(self, model: Model, *, max_num_seqs: int, max_model_len: int, adapts: bool) -> int:
        if not self._captures:
            return 0
        attention = by_group(self.shape, lambda shape: TritonAttention(shape, 2, self.device))
        try:
            return decode_graphs.predict_graph_bytes(model, attention, max_num_seqs, max_model_len, adapts=adapts)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # torch's type for CUDA's errors; `decode_path` says which
            return 0

    def choose_tokens(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return sampler.choose(logits, batch, *self._sampling)


def why_triton_is_unusable(shape: KVCacheShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Compile our attention kernels for the model's shape, run them, and compare them with torch.

    A phrase that says what is wrong; None if they are usable. What is compiled here delays no request later.
    """
    if device.type != "cuda" and not INTERPRETED:
        return "there is no CUDA device"
    kinds = shape.kinds()
    if unfit := [kind.head_dim for kind in kinds if kind.head_dim % 2 or kind.head_dim > _MOST_HEAD_DIM]:
        return f"its kernels take even head dimensions up to {_MOST_HEAD_DIM}, the model's is {unfit[0]}"
    if device.type == "cuda" and shape.dtype.itemsize == 1 and not _has_fp8(device):
        return "this GPU has no fp8 arithmetic (compute capability 8.9 or newer)"
    spans = [MIXED, _MANY_DECODES] if device.type == "cuda" else [MIXED[:3]]
    return why_wrong([Case(kind, dtype, each) for kind in kinds for each in spans], TritonAttention, device)


def _has_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


def _why_wrong(product: CudaQuantizedLinear, linear: QuantizedLinear) -> str | None:
    """What the product raises, or its difference from torch's if that is too large; None if it is right."""
    weight, reference = linear.quantized, linear if product.rounds else _without_rounding(linear)
    row = torch.linspace(-1, 1, weight.shape[1], dtype=linear.dtype, device=weight.values.device)
    for hidden in (row.expand(3, -1), row.expand(MOST_ROWS + 1, -1)):  # by our kernel, and by torch's product
        try:
            expected = reference(hidden).float()
            error = float((product(hidden).float() - expected).norm() / expected.norm())
        except Exception as raised:  # of a compiler, a driver or a GPU: torch is used
            return first_line(raised)
        if not error <= 2 * BOUNDS[linear.dtype]:
            return f"its result is off by {error:.2g}"
    return None


def _without_rounding(linear: Linear) -> Linear:
    """Of activations, as by our products, which multiply them as they are."""
    if not isinstance(linear, QuantizedLinear):
        return linear
    return QuantizedLinear(replace(linear.quantized, activations=None), linear.dtype, linear.bias)


def _why_experts_are_wrong(product: CudaExperts, experts: Experts, model: Model) -> str | None:
    """Of three tokens with all experts between them; as `_why_wrong`."""
    count = len(experts.gate_up)
    hidden = torch.linspace(-1, 1, 3 * model.config.hidden_size, dtype=model.dtype, device=model.device).view(3, -1)
    chosen = torch.arange(3 * count, device=model.device).view(3, -1).roll(1, 1) % count
    weights = torch.full(chosen.shape, 1 / count, device=model.device)
    gate_up, down = ([*map(_without_rounding, each)] for each in (experts.gate_up, experts.down))
    try:
        expected = Experts(gate_up, down, experts.activation)(hidden, chosen, weights, model.ops).float()
        error = float((product(hidden, chosen, weights, model.ops).float() - expected).norm() / expected.norm())
    except Exception as raised:  # of a compiler, a driver or a GPU: torch is used
        return first_line(raised)
    return None if error <= 2 * BOUNDS[model.dtype] else f"its result is off by {error:.2g}"


def why_unusable(mask: TopKTopP, pick: Invert, vocab_size: int, device: torch.device) -> str | None:
    """A phrase that says what is wrong; None if both agree with torch."""
    try:
        return None if agree(mask, pick, vocab_size, device) else "their results differ from torch's"
    except Exception as error:  # of a compiler, a driver or a GPU: torch is used
        return first_line(error)


def agree(mask: TopKTopP, pick: Invert, vocab_size: int, device: torch.device) -> bool:
    """Whether both keep and draw what torch does, of rows with and without ties, where few, many and all are kept."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([[0.1], [2.0], [8.0], [3.0]])
    logits = torch.randn(4, vocab_size, generator=generator) * spread
    logits[3] = logits[3].round()
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp().to(device)
    shares = torch.tensor([0.5, 0.99, 1e-300, 0.9], dtype=torch.float64, device=device)
    wanted = ((shares * weights.sum(dim=-1, dtype=torch.float64), True), ((shares * 100).ceil(), False))
    masked = [top_k_top_p(weights, each, by_mass) for each, by_mass in wanted]
    uniforms = torch.rand(4, generator=generator, dtype=torch.float64).to(device)
    return all(
        torch.equal(mask(weights.clone(), each, by_mass), kept)
        for (each, by_mass), kept in zip(wanted, masked, strict=True)
    ) and all(torch.equal(pick(each, uniforms), invert(each, uniforms)) for each in (weights, *masked))
