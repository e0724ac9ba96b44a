"""The time of an engine's step by what is in its batch: the latency model of planner, simulator and autoscaler.

A step reads the weights once and multiplies every token by them: whichever takes longer bounds it (the roofline;
Williams et al., CACM 52(4), 2009). Beside that, it reads the keys and values of every sequence that decodes, computes
attention between the tokens of prompts, and has overheads of its own and for each sequence.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from llmservice_planner.model.quantization import Quantization, WeightFormat
from llmservice_planner.model.shape import DTYPE_BYTES, ModelShape
from llmservice_planner.sizing.gpu import CPU, GPU, Device

ARITHMETIC_SHARE = 0.75
"""Of a data sheet's rate that a prompt's products reach: 74 to 76 % on an H200 (docs/benchmarks.md, prompts of 8192 and
2048 tokens without their attention); a large product alone reaches 80 % there."""
BANDWIDTH_SHARE = 0.78
"""Of a data sheet's bandwidth that decode steps read weights and keys with, beside the overheads below: fitted to the
steps of 1 to 64 sequences on an H200 (docs/benchmarks.md), within 4 to 6 % of each; copies reach 89 % there. Whole
decode steps of one sequence reach 81 % on an L4 (arXiv:2605.30571)."""
ATTENTION_SHARE = 0.35
"""Of the arithmetic rate that attention over prompts reaches: our kernel 26 and 39 % on an H200, with prompts of 2048
and 8192 tokens (docs/benchmarks.md); FlashAttention-2 35 % on an H100 (arXiv:2407.08608)."""
STEP_S = 2e-4
"""Per step, of the host: the scheduler's 0.42 ms with 256 sequences (docs/benchmarks.md) overlap with the GPU's work
for the larger part."""
LAYER_S = 1.25e-5
"""Per layer and step: eight to ten kernels of a CUDA graph, each of which takes 1 to 2 us to start and to end. With
this, an 8B model on an H200 takes 4.65 ms for one sequence; 4.65 and 4.77 were measured (docs/benchmarks.md)."""
ALL_REDUCE_S = 1e-5
"""The latency of one all-reduce of a small message between GPUs, of which a layer has two: 9 to 12 us with vLLM's
kernel on two to eight H100s, 4 to 8 us with SGLang's (https://github.com/sgl-project/sglang/pull/2904)."""
LINK_SHARE = 0.75
"""Of a link's data sheet that all-reduces of large messages reach: 366 GB/s between four H100s, 77 % of what the links
of that machine allow (https://waynehacking8.github.io)."""
_FLOAT32_SLOWDOWN = 8
"""Of float32, which runs outside the tensor cores; TF32 is not used."""


class LatencyError(ValueError):
    """A latency model's file that cannot be read; the message names what is wrong."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step computes, or the average of several steps, whose numbers are not whole."""

    num_seqs: float
    """Sequences that decode a token."""
    context_tokens: float
    """The sum of their contexts: the tokens whose keys and values are read."""
    prompt_tokens: float = 0
    """Prompt tokens computed in the step."""
    prompt_chunks: float = 0
    """The prompts that they are of."""
    attention_pairs: float = 0
    """Over these chunks, the sum of the tokens that each token attends to; see `attention_pairs`."""


def attention_pairs(start: int, num_tokens: int) -> int:
    """The pairs of a chunk of `num_tokens` after `start` tokens of its prompt, with causal attention."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """The coefficients of a model on its devices. Raises `LatencyError` if one is negative or not finite.

    With n = num_seqs + prompt_tokens, a step takes

        step_s + mixed_s x min(1, prompt_chunks) + sequence_s x (num_seqs + prompt_chunks) + transfer_s x n
        + max(weights_s x (1 - expert_share x expert_idle^n), token_s x n)
        + kv_token_s x context_tokens + pair_s x attention_pairs
    """

    step_s: float
    """Overhead of a step: host, kernel launches, latency of the links between GPUs."""
    sequence_s: float
    """Per sequence in a step: the output head's arithmetic, sampling."""
    weights_s: float
    """Reading all weights once."""
    token_s: float
    """The arithmetic of one token with the layers' matrices."""
    kv_token_s: float
    """Reading the keys and values of one token in a decode step."""
    pair_s: float
    """Attention between one token of a prompt and one before it."""
    mixed_s: float = 0.0
    """Overhead of a step with prompt tokens beside `step_s`: it runs other code than one that only decodes."""
    transfer_s: float = 0.0
    """Moving one token's activations between GPUs."""
    expert_share: float = 0.0
    """The share of the weights in routed experts."""
    expert_idle: float = 0.0
    """The chance that a token is not routed to an expert, assuming uniform routing."""
    window_share: float = 0.0
    """The share of keys, values and pairs in layers with a sliding window."""
    window_tokens: int = 0
    """The tokens that these layers attend to."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise LatencyError(f"{item.name} is {value!r}, expected a number that is not negative")
        for name in ("expert_share", "expert_idle", "window_share"):
            if getattr(self, name) > 1:
                raise LatencyError(f"{name} is {getattr(self, name)}, expected at most 1")

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        device: Device,
        device_count: int,
        dtype: str,
        weights_bytes: int,
        kv_bytes_per_token: int,
        quantization: Quantization = "auto",
    ) -> LatencyModel | None:
        """By the device's rates and the shares above; None if the rates are unknown (a CPU, an unknown GPU).

        `weights_bytes`, `kv_bytes_per_token`: over all devices. A CPU's rates are measured ones and taken as they are.
        """
        if device.bandwidth_bytes_per_s is None or device.flops_16bit is None:
            return None
        on_gpu = isinstance(device, GPU)
        bandwidth = device_count * device.bandwidth_bytes_per_s * (BANDWIDTH_SHARE if on_gpu else 1)
        flops = device_count * device.flops_16bit * (ARITHMETIC_SHARE if on_gpu else 1)
        if on_gpu and dtype == "float32":
            flops /= _FLOAT32_SLOWDOWN
        width = DTYPE_BYTES[dtype]
        embedding = shape.vocab_size * shape.hidden_size
        # The input embedding is looked up, not multiplied; a tied one is the output head, unless that is a copy.
        has_copy = isinstance(device, CPU) or quantization == "int8"
        is_looked_up = shape.is_encoder or not shape.tie_word_embeddings or has_copy
        read_bytes = max(1, weights_bytes - embedding * width * is_looked_up)
        head = 0 if shape.is_encoder else embedding
        tables = embedding if shape.is_encoder or shape.tie_word_embeddings else 2 * embedding
        experts = shape.expert_bytes(dtype, quantization, on_cpu=not on_gpu)
        transfer_s, latency_s = _all_reduces(shape, device, device_count, width)
        attention_flops = flops * ATTENTION_SHARE / ARITHMETIC_SHARE if on_gpu else flops
        return cls(
            step_s=(STEP_S + shape.layers * LAYER_S + latency_s) if on_gpu else 0.0,
            sequence_s=2 * head / flops,
            weights_s=read_bytes / bandwidth,
            token_s=2 * max(1, shape.active_parameters - tables) / (flops * _fp8_speedup(shape, device, quantization)),
            kv_token_s=kv_bytes_per_token / bandwidth,
            pair_s=_pair_operations(shape) / attention_flops,
            transfer_s=transfer_s,
            expert_share=min(1.0, experts / read_bytes),
            expert_idle=1 - shape.experts_per_token / shape.num_experts if experts else 0.0,
            window_share=shape.window_share,
            window_tokens=shape.sliding_window or 0,
        )

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> LatencyModel:
        """From `to_dict`. The key `calibration` beside the coefficients is ignored. Raises `LatencyError`."""
        known = {item.name: item for item in fields(cls)}
        if unknown := sorted(set(given) - {*known, "calibration"}):
            raise LatencyError(f"unknown coefficient {', '.join(unknown)}: expected are {', '.join(known)}")
        if missing := [name for name in known if name not in given and name in _REQUIRED]:
            raise LatencyError(f"the coefficients {', '.join(missing)} are missing: `llmservice calibrate` writes all")
        return cls(**{name: given[name] for name in known if name in given})

    @classmethod
    def read(cls, path: Path) -> LatencyModel:
        """From a file of `llmservice calibrate -o`. Raises `LatencyError`, which names the file."""
        try:
            given = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise LatencyError(f"{path} is no latency model in JSON ({error}): write one with calibrate -o") from error
        if not isinstance(given, Mapping):
            raise LatencyError(f"{path} holds {type(given).__name__}, expected an object with the coefficients")
        try:
            found = cls.from_dict(given)
        except LatencyError as error:
            raise LatencyError(f"{path}: {error}") from error
        if not found.step_s and not found.weights_s and not found.token_s:
            raise LatencyError(f"{path}: step_s, weights_s and token_s are 0, by which steps take no time")
        return found

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @property
    def ridge_tokens(self) -> int | None:
        """The tokens of a step above which the arithmetic takes longer than reading the weights; None: there is none.

        Close to a GPU's operations per byte in bf16: 312 TFLOP/s / 2 TB/s = 156 on an A100.
        """
        return max(1, int(self.weights_s / self.token_s)) if self.token_s else None

    def seconds(self, batch: StepBatch) -> float:
        """Of one step; 0 if the batch is empty. Monotone in each field of `batch`."""
        tokens = batch.num_seqs + batch.prompt_tokens
        if not tokens:
            return 0.0
        return (
            self._base_s(batch.num_seqs + batch.prompt_chunks, tokens)
            + self.mixed_s * min(1, batch.prompt_chunks)
            + self.kv_token_s * self._tokens_read(batch.num_seqs, batch.context_tokens)
            + self.pair_s * self._pairs(batch)
        )

    def parts(self, batch: StepBatch) -> dict[str, float]:
        """The terms of `seconds`; of weights and arithmetic, the one that takes less time is 0."""
        tokens = batch.num_seqs + batch.prompt_tokens
        reading, computing = self._weights_s(tokens), self.token_s * tokens
        return {
            "overhead": self.step_s
            + self.mixed_s * min(1, batch.prompt_chunks)
            + self.sequence_s * (batch.num_seqs + batch.prompt_chunks)
            + self.transfer_s * tokens,
            "weights": reading if reading >= computing else 0.0,
            "arithmetic": computing if reading < computing else 0.0,
            "kv": self.kv_token_s * self._tokens_read(batch.num_seqs, batch.context_tokens),
            "attention": self.pair_s * self._pairs(batch),
        }

    def decode_s(self, num_seqs: int, context_tokens_each: float) -> float:
        """Of a step that decodes a token for each of `num_seqs` sequences."""
        return self.seconds(StepBatch(num_seqs, round(num_seqs * context_tokens_each)))

    def decode_run_s(self, num_seqs: int, context_tokens: int, steps: int) -> float:
        """Of `steps` consecutive decode steps: the sum of their `seconds`, in closed form.

        `context_tokens` is the sum of the contexts in the first step; each context grows by a token per step.
        """
        if not num_seqs or steps < 1:
            return 0.0
        read: float = steps * context_tokens + num_seqs * (steps * (steps - 1) // 2)
        if self.window_share:
            limit = num_seqs * self.window_tokens
            growing = min(steps, max(0, -(-(limit - context_tokens) // num_seqs)))  # steps below the limit
            in_window = growing * context_tokens + num_seqs * (growing * (growing - 1) // 2) + (steps - growing) * limit
            read += self.window_share * (in_window - read)
        return steps * self._base_s(num_seqs, num_seqs) + self.kv_token_s * read

    def prefill_s(
        self, num_tokens: int, chunk: int | None = None, num_seqs: float = 0, context_tokens: float = 0
    ) -> float:
        """Of the steps that compute a prompt of `num_tokens`, and in each decode a token for `num_seqs` sequences.

        `chunk`: prompt tokens of a step at most; None: one step. `context_tokens`: of these sequences, their sum.
        """
        seconds, start = 0.0, 0
        while start < num_tokens:
            size = min(num_tokens - start, chunk or num_tokens)
            seconds += self.seconds(StepBatch(num_seqs, context_tokens, size, 1, attention_pairs(start, size)))
            start += size
        return seconds

    def longest_prefill(self, seconds: float, most: int) -> int:
        """Tokens of the longest prompt, up to `most`, that one step computes in so long; 0: none is so short."""
        return bisect_right(range(1, most + 1), seconds, key=self.prefill_s)

    def _base_s(self, num_seqs: float, tokens: float) -> float:
        matrices_s = max(self._weights_s(tokens), self.token_s * tokens)
        return self.step_s + self.sequence_s * num_seqs + self.transfer_s * tokens + matrices_s

    def _pairs(self, batch: StepBatch) -> float:
        """Those of layers with a window are bounded by it."""
        if not self.window_share:
            return batch.attention_pairs
        in_window = min(batch.attention_pairs, batch.prompt_tokens * self.window_tokens)
        return batch.attention_pairs + self.window_share * (in_window - batch.attention_pairs)

    def _weights_s(self, tokens: float) -> float:
        return self.weights_s * (1 - self.expert_share * math.pow(self.expert_idle, tokens))

    def _tokens_read(self, num_seqs: float, context_tokens: float) -> float:
        """The contexts, of which layers with a window read less; as if all were equally long."""
        in_window = min(context_tokens, num_seqs * self.window_tokens)
        return context_tokens + self.window_share * (in_window - context_tokens)


_REQUIRED = ("step_s", "sequence_s", "weights_s", "token_s", "kv_token_s", "pair_s")


def _pair_operations(shape: ModelShape) -> int:
    """Operations of attention between two tokens in all layers; a multiplication and an addition count as two."""
    width = 2 * shape.head_dim
    if shape.is_mla:
        width = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
    both_directions = 2 if shape.is_encoder else 1  # pairs are counted as causal ones
    return 2 * shape.layers * shape.heads * width * both_directions


def _fp8_speedup(shape: ModelShape, device: Device, quantization: Quantization) -> float:
    """Of the products with fp8 weights whose activations are rounded to fp8; the server computes others in 16 bits."""
    if shape.quantization is None or not isinstance(device, GPU) or not device.flops_fp8 or not device.flops_16bit:
        return 1.0
    form = WeightFormat.parse(shape.quantization)
    is_fp8 = form.held_as(quantization, on_cpu=False) == "stored" and form.is_fp8_product
    return device.flops_fp8 / device.flops_16bit if is_fp8 else 1.0


def _all_reduces(shape: ModelShape, device: Device, device_count: int, width: int) -> tuple[float, float]:
    """Of a step with tensor parallelism: seconds per token, and the latency; a layer has two all-reduces."""
    if device_count == 1 or not isinstance(device, GPU):
        return 0.0, 0.0
    sent_bytes = 2 * shape.layers * shape.hidden_size * width * 2 * (device_count - 1) / device_count
    return sent_bytes / (device.link_bytes_per_s * LINK_SHARE), 2 * shape.layers * ALL_REDUCE_S
