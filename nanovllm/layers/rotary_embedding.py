"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split layout."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.kernels.rope import Rotation, apply_rotary_emb
from nanovllm.layers.layernorm import RMSNorm

__all__ = ["RopeConfig", "RotaryEmbedding", "apply_rotary_emb", "get_rope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A checkpoint's rotation frequencies.

    Attributes:
        theta: base of the geometric series of wavelengths.
        kind: "default", "linear" (all frequencies / factor) or "llama3" (low frequencies /
            factor, high ones kept, a ramp between).
        factor: by how much long wavelengths are stretched.
        low_freq_factor, high_freq_factor, original_max_position: llama3's ramp: wavelengths
            over original / low are stretched fully, those under original / high not at all.
        freq_divisors: per-frequency divisors that a GGUF file states outright, [head_dim / 2].
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    freq_divisors: tuple[float, ...] | None = None


class RotaryEmbedding(nn.Module):
    """Rotations of queries and keys by their positions, from an fp32 cache of cosines and sines.

    ``cos_sin_cache`` is [max_position, head_dim]: cosines, then sines.
    """

    cos_sin_cache: torch.Tensor

    def __init__(self, head_dim: int, max_position: int, rope: RopeConfig | None) -> None:
        super().__init__()
        # In fp64: at position 100,000 an fp32 angle is off by 4e-3.
        angles = torch.outer(
            torch.arange(max_position, dtype=torch.float64), _inv_freq(head_dim, rope)
        )
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def forward(
        self, positions: torch.Tensor, q_norm: RMSNorm | None = None, k_norm: RMSNorm | None = None
    ) -> Rotation:
        """What attention does to its queries and keys at these positions, int32 [N]; norms of
        each head come before the rotation, both or neither."""
        if q_norm is None or k_norm is None:
            return Rotation(positions, self.cos_sin_cache)
        weights = q_norm.weight, k_norm.weight
        return Rotation(positions, self.cos_sin_cache, *weights, q_norm.eps)


def get_rope(head_dim: int, max_position: int, rope: RopeConfig | None) -> RotaryEmbedding:
    """The rotary embedding that layers of equal ``rope`` share. None is for layers without one:
    every angle is 0, so that queries and keys stay as they are, in the same kernels."""
    return RotaryEmbedding(head_dim, max_position, rope)


def _inv_freq(head_dim: int, rope: RopeConfig | None) -> torch.Tensor:
    """Radians per position of each pair, fp64 [head_dim / 2]."""
    if rope is None:
        return torch.zeros(head_dim // 2, dtype=torch.float64)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    inv_freq = rope.theta**-exponents
    if rope.freq_divisors is not None:
        inv_freq = inv_freq / torch.tensor(rope.freq_divisors, dtype=torch.float64)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * inv_freq / (2 * math.pi)
        ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = ramp.clamp(0, 1)
        return inv_freq * (keep + (1 - keep) / rope.factor)
    assert rope.kind == "default", rope.kind
    return inv_freq
