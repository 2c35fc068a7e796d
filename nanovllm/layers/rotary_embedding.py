"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split layout."""

import torch
from torch import nn

from nanovllm.kernels.rope import RopeInputs
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.utils.rope import RopeConfig, cos_sin_table, query_scales


class RotaryEmbedding(nn.Module):
    """Rotary embedding with precomputed cosines and sines.

    ``cos_sin_cache`` is fp32 [max_position, head_dim]: head_dim / 2 cosines, then head_dim / 2
    sines. If ``rope`` is None, every angle is 0, so the same kernels leave queries and keys
    unchanged.

    ``query_scale`` is [max_position, 1, 1], the factor of the query at each position, applied
    before RoPE. It is None if queries are not scaled.
    """

    cos_sin_cache: torch.Tensor
    query_scale: torch.Tensor | None

    def __init__(self, head_dim: int, max_position: int, rope: RopeConfig | None) -> None:
        super().__init__()
        table = cos_sin_table(rope, head_dim, max_position)
        self.register_buffer("cos_sin_cache", table, persistent=False)
        self.register_buffer("query_scale", query_scales(rope, max_position), persistent=False)

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
