"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split layout."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.kernels.rope import RopeInputs
from nanovllm.layers.layernorm import RMSNorm


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The RoPE frequencies of a checkpoint.

    Attributes:
        theta: base of the geometric series of frequencies.
        rope_type: "default", "linear" (all frequencies are divided by ``factor``) or "llama3" (low
            frequencies are divided by ``factor``, high ones kept, with a linear ramp between).
        factor: the RoPE scaling factor.
        low_freq_factor, high_freq_factor, original_max_position: the ramp of "llama3". Wavelengths
            over original_max_position / low_freq_factor are scaled fully, those under
            original_max_position / high_freq_factor not at all.
        freq_divisors: [head_dim / 2], a divisor for each frequency, as GGUF files store them.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    freq_divisors: tuple[float, ...] | None = None


class RotaryEmbedding(nn.Module):
    """Rotary embedding with precomputed cosines and sines.

    ``cos_sin_cache`` is fp32 [max_position, head_dim]: head_dim / 2 cosines, then head_dim / 2
    sines. If ``rope`` is None, every angle is 0, so that the same kernels leave queries and keys as
    they are.
    """

    cos_sin_cache: torch.Tensor

    def __init__(self, head_dim: int, max_position: int, rope: RopeConfig | None) -> None:
        super().__init__()
        # fp64, because at position 100,000 the error of an fp32 angle is 4e-3.
        angles = torch.outer(
            torch.arange(max_position, dtype=torch.float64), _inv_freq(head_dim, rope)
        )
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def forward(
        self, positions: torch.Tensor, q_norm: RMSNorm | None = None, k_norm: RMSNorm | None = None
    ) -> RopeInputs:
        """Returns the inputs of the RoPE kernels, which the attention layer applies.

        Args:
            positions: int32 [N].
            q_norm, k_norm: norms of each query and key head before RoPE; both or neither.
        """
        if q_norm is None or k_norm is None:
            return RopeInputs(positions, self.cos_sin_cache)
        weights = q_norm.weight, k_norm.weight
        return RopeInputs(positions, self.cos_sin_cache, *weights, q_norm.eps)


def _inv_freq(head_dim: int, rope: RopeConfig | None) -> torch.Tensor:
    """Returns the frequency of each pair in radians per position, fp64 [head_dim / 2]."""
    if rope is None:
        return torch.zeros(head_dim // 2, dtype=torch.float64)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    inv_freq = rope.theta**-exponents
    if rope.freq_divisors is not None:
        inv_freq = inv_freq / torch.tensor(rope.freq_divisors, dtype=torch.float64)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        turns = rope.original_max_position * inv_freq / (2 * math.pi)
        ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = ramp.clamp(0, 1)
        return inv_freq * (keep + (1 - keep) / rope.factor)
    assert rope.rope_type == "default", rope.rope_type
    return inv_freq
