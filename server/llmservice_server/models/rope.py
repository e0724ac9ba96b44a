"""Rotary position embeddings (RoFormer, arXiv:2104.09864) and the ways of stretching them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from llmservice_planner.model.config import stretched_context
from llmservice_server.types.checkpoint_config import CheckpointConfig, RopeParameters
from llmservice_server.types.errors import ModelLoadError

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A checkpoint's rotary embedding. `scaling` holds the numbers that `kind` asks for, under config.json's names."""

    theta: float
    kind: str
    scaling: Mapping[str, float]
    truncate: bool = True  # yarn: round the bounds of its ramp

    @classmethod
    def of(cls, config: CheckpointConfig) -> RopeConfig:
        """Of `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Of both, transformers takes the latter; where the former has one for each kind of layer, the latter changes the
        one of layers without a window. Where there is one for all, the original context beside it goes before its own.
        """
        parameters = config.rope_scaling or config.rope_parameters or RopeParameters()
        if config.rope_parameters is not None and config.local_rope_parameters is not None:
            parameters = config.rope_parameters.model_copy(update=parameters.model_dump(exclude_unset=True))
        if (original := config.original_max_position_embeddings) is not None and cls.of_windows(config) is None:
            parameters = parameters.model_copy(update={"original_max_position_embeddings": original})
        return cls._of(config, parameters, config.rope_theta)

    @classmethod
    def of_windows(cls, config: CheckpointConfig) -> RopeConfig | None:
        """That of layers with a window, where they have their own (Gemma 3)."""
        if config.local_rope_parameters is None and config.rope_local_base_freq is None:
            return None
        return cls._of(config, config.local_rope_parameters or RopeParameters(), config.rope_local_base_freq)

    @classmethod
    def _of(cls, config: CheckpointConfig, parameters: RopeParameters, theta: float | None) -> RopeConfig:
        kind = parameters.rope_type or parameters.type or "default"
        kind = "default" if kind == "mrope" else kind  # three positions, which are equal where there are no images
        if kind not in SUPPORTED:
            raise ModelLoadError(
                f"config.json: rope type {kind!r} is not supported, expected one of {', '.join(SUPPORTED)}"
            )
        if any((one.partial_rotary_factor or 1.0) != 1.0 for one in (config, parameters)):
            raise ModelLoadError("config.json: partial_rotary_factor is not 1, which no supported model family uses")
        numbers = parameters.model_dump(exclude_none=True, exclude={"rope_type", "type", "rope_theta", "truncate"})
        scaling = {key: float(value) for key, value in numbers.items()}
        scaling.setdefault("original_max_position_embeddings", float(config.max_position_embeddings))
        needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ())
        if missing := [name for name in needed if name not in scaling]:
            raise ModelLoadError(f"config.json: rope type {kind!r} needs {', '.join(missing)} in rope_parameters")
        return cls(parameters.rope_theta or theta or 10000.0, kind, scaling, parameters.truncate)

    def max_context(self, max_position_embeddings: int) -> int:
        """Tokens up to which the embedding is right.

        Dynamic NTK is plain RoPE up to `max_position_embeddings`; beyond, its frequencies would change under keys
        that are already in the cache, so that is where it ends.
        """
        return stretched_context(max_position_embeddings, {"rope_type": self.kind, **self.scaling})

    def inverse_frequencies(self, head_dim: int, max_position_embeddings: int) -> tuple[torch.Tensor, float]:
        """Radians per position of each pair of dimensions, float32 `[head_dim / 2]`, and the factor of cos and sin."""
        plain = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.kind == "linear":
            return plain / self.scaling["factor"], 1.0
        if self.kind == "llama3":
            return self._llama3(plain), 1.0
        if self.kind == "yarn":
            return self._yarn(plain, head_dim, max_position_embeddings)
        return plain, 1.0

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        """Llama 3.1: wavelengths short against the original context stay, long ones are stretched, a ramp between."""
        factor = self.scaling["factor"]
        low, high = self.scaling["low_freq_factor"], self.scaling["high_freq_factor"]
        turns = self.scaling["original_max_position_embeddings"] * plain / (2 * math.pi)  # over the original context
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * kept + plain / factor * (1 - kept)

    def _yarn(self, plain: torch.Tensor, head_dim: int, max_position_embeddings: int) -> tuple[torch.Tensor, float]:
        """YaRN (arXiv:2309.00071): as llama3, with the ramp over dimensions, and attention sharpened by a factor."""
        original = self.scaling["original_max_position_embeddings"]
        factor = self.scaling.get("factor") or max_position_embeddings / original

        def dimension(turns: float) -> float:
            return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.scaling.get("beta_fast") or 32), dimension(self.scaling.get("beta_slow") or 1)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = (high - low) or 0.001  # one step instead of a ramp
        stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        return plain / factor * stretched + plain * (1 - stretched), yarn_attention_factor(self.scaling, factor)


def yarn_attention_factor(scaling: Mapping[str, float], factor: float) -> float:
    """Of cos and sin, by the numbers of config.json."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given := scaling.get("attention_factor"):
        return given
    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return (mscale(over) / mscale(under) if over and under else mscale(1.0)) * (scaling.get("attn_factor") or 1.0)


class RotaryEmbedding:
    """Cosines and sines by position, computed once a step in float32: no table, and no length at which it ends."""

    def __init__(
        self, inverse_frequencies: torch.Tensor, scale: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.inverse_frequencies = inverse_frequencies.to(device)
        self.scale = scale
        self.dtype = dtype

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of `positions` `[num_tokens]`, each `[num_tokens, 1, head_dim]`, for `rotate`."""
        angles = positions[:, None, None] * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return torch.cat((cos, cos), dim=-1).to(self.dtype), torch.cat((-sin, sin), dim=-1).to(self.dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `heads` `[num_tokens, num_heads, head_dim]` in place; the first half of `sin` is negated."""
    first, second = heads.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    heads.mul_(cos).addcmul_(swapped, sin)
