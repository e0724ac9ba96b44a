"""The backend for CPUs: numba kernels, and matrices in oneDNN's layout."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from llmservice_server.backend.base import Attention, DecodePath, Decoder, Model
from llmservice_server.backend.cpu import int4, int8, sampler
from llmservice_server.backend.cpu.attention import CpuAttention
from llmservice_server.backend.cpu.decode import CpuDecode, can_decode
from llmservice_server.backend.cpu.experts import CpuExperts
from llmservice_server.backend.cpu.layer_ops import CpuLayerOps
from llmservice_server.backend.cpu.linear import KERNEL_ROWS, OwnPackedLinear, PackedLinear, pack
from llmservice_server.backend.cpu.linear_kernels import HAS_TILES
from llmservice_server.backend.grouped import by_group
from llmservice_server.backend.layers import Linear
from llmservice_server.backend.quantized import QuantizedLinear, QuantizedWeight
from llmservice_server.backend.sampling_batch import PenalizedRows, SamplingBatch
from llmservice_server.backend.torch.backend import TorchBackend

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class CpuBackend(TorchBackend):
    """`worth_compiling`: the model is large enough for kernels that take seconds to compile."""

    name: str = "cpu"
    worth_compiling: bool = False

    def keeps(self, weight: QuantizedWeight) -> bool:
        return int4.can_multiply(weight) or (weight.activations == "int8" and int8.can_multiply(weight))

    def prepare(self, model: Model) -> None:
        model.map_linears(lambda linear: converted(linear, for_kernel=self.worth_compiling))
        *_, head = model.linears()
        if isinstance(head, OwnPackedLinear) and not HAS_TILES:
            _LOG.info("this CPU has no instructions for bfloat16: such weights are converted to float32 in products")
        if not isinstance(head, PackedLinear | int4.Int4Linear | int8.Int8Linear):
            return  # products that are not packed dominate everything else
        model.ops = CpuLayerOps(threaded=self.worth_compiling)
        if not self.worth_compiling:
            return
        for linear in model.linears():
            if isinstance(linear, PackedLinear):
                linear.use_kernel()
        for mixture in model.mixtures():
            mixture.experts = CpuExperts.of(mixture.experts, model.dtype) or mixture.experts

    def attention(self, num_blocks: int) -> Attention:
        return by_group(self.shape, lambda shape: CpuAttention(shape, num_blocks, tiled=self.worth_compiling))

    def decode_path(
        self, model: Model, attention: Attention, *, max_num_seqs: int, max_model_len: int
    ) -> DecodePath | None:
        if not isinstance(attention, CpuAttention) or not isinstance(model, Decoder):
            return None
        if not can_decode(model):
            return None
        return CpuDecode(model, attention, min(max_num_seqs, KERNEL_ROWS))

    def choose_tokens(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return sampler.choose(logits, batch)

    def penalize(self, logits: torch.Tensor, penalized: PenalizedRows) -> None:
        sampler.penalize(logits, penalized)


def converted(linear: Linear, *, for_kernel: bool) -> Linear:
    """In the fastest layout for its products; a matrix that is quantised for others stays as it is."""
    if not isinstance(linear, QuantizedLinear):
        return pack(linear, for_kernel=for_kernel)
    weight = linear.quantized
    if int4.can_multiply(weight):
        return int4.Int4Linear.of(weight, linear.bias)
    made_for_int8 = weight.activations == "int8" and int8.can_multiply(weight)
    return int8.Int8Linear.of(weight, linear.bias) if made_for_int8 else linear
