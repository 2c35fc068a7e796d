"""The experts' MLPs and the sum of their outputs, in plain PyTorch: the CPU path, and the reference
of the kernels."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.kernels.fp8 import FP8, Fp8Rows, dequantize
from nanovllm.kernels.gemm.onednn import row_block_linear
from nanovllm.kernels.moe.mxfp4 import unpack_mxfp4
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.silu_and_mul import (
    invariant_silu_and_mul_reference,
    silu_and_mul_reference,
)


class ExpertWeights(NamedTuple):
    """The weights of E experts, and their activation.

    Attributes:
        gate_up: [E, 2 I, hidden], the rows of gate, then those of up.
        down: [E, hidden, I].
        gate_up_bias: [E, 2 I], or None.
        down_bias: [E, hidden], or None.
        limit, alpha: with a limit, the activation is (up + 1) * gate * sigmoid(alpha * gate), with
            gate clamped to at most ``limit``, and up to [-limit, limit]. Without one it is SwiGLU.
        gate_up_scales, down_scales: for MXFP4 weights, the scales of their blocks, from
            ``mxfp4.pack_mxfp4_scales``. gate_up and down are then words from ``mxfp4.pack_mxfp4``:
            [E, num_groups, 2 I or hidden, 32]. For FP8 weights, fp32 scales of rows, [E, 2 I] and
            [E, hidden], or of blocks of GROUP x GROUP elements. gate_up and down are then in FP8;
            or uint8, the bits of FP8 numbers, if inputs are not quantised. None for other weights.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    limit: float | None = None
    alpha: float = 1.0
    gate_up_scales: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None

    @property
    def group(self) -> int | None:
        """The size of the blocks of FP8 weights that share a scale; None for other weights."""
        if self.down.itemsize > 1 or self.down_scales is None or self.down_scales.dim() < 3:
            return None
        return self.down.size(2) // self.down_scales.size(2)

    def dequantized(self, dtype: torch.dtype) -> "ExpertWeights":
        """Returns the experts with quantised weights dequantised to ``dtype``. Other weights stay
        as they are."""
        if self.gate_up_scales is None or self.down_scales is None:
            return self
        if self.down.itemsize == 1:
            gate_up = dequantize(Fp8Rows(self.gate_up.view(FP8), self.gate_up_scales), dtype)
            down = dequantize(Fp8Rows(self.down.view(FP8), self.down_scales), dtype)
        else:
            hidden, columns = self.down.size(-2), self.gate_up.size(-2) // 2
            gate_up = unpack_mxfp4(self.gate_up, self.gate_up_scales, hidden, dtype)
            down = unpack_mxfp4(self.down, self.down_scales, columns, dtype)
        return self._replace(gate_up=gate_up, down=down, gate_up_scales=None, down_scales=None)


def clamped_swiglu(x: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """The activation of experts with a limit, with gate and up concatenated: [N, 2 I] -> [N, I]."""
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


def invariant_clamped_swiglu(x: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Like ``invariant_silu_and_mul_reference``, for ``clamped_swiglu``: torch.sigmoid would also
    process some elements in another way."""
    gate, up = x.float().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate / (torch.exp(-alpha * gate) + 1))).to(x.dtype)


class ExpertOps(NamedTuple):
    """The operations of ``experts_reference``.

    Attributes:
        linear: (x, weight, bias) -> x W^T + b.
        silu_and_mul, clamped_swiglu: the activation without and with a limit.
    """

    linear: Callable[..., Any] = F.linear
    silu_and_mul: Callable[..., Any] = silu_and_mul_reference
    clamped_swiglu: Callable[..., Any] = clamped_swiglu


DEFAULT_OPS = ExpertOps()
# The result for a token has the same bits whatever the other tokens are.
INVARIANT_OPS = ExpertOps(
    row_block_linear, invariant_silu_and_mul_reference, invariant_clamped_swiglu
)


def experts_reference(
    x: torch.Tensor,
    experts: ExpertWeights,
    routing: Routing,
    residual: torch.Tensor | None,
    ops: ExpertOps = DEFAULT_OPS,
) -> torch.Tensor:
    """Computes each expert's MLP for the tokens routed to it, and sums the weighted outputs of a
    token in the order of the experts.

    Args:
        x: [N, hidden].
        experts: the weights.
        routing: the experts of each token, and their routing weights.
        residual: [N, hidden], added to the result; None for zero.
        ops: the linear layer and the activations.

    Returns:
        [N, hidden].
    """
    experts = experts.dequantized(x.dtype)
    out = torch.zeros_like(x) if residual is None else residual.clone()
    top_k = routing.topk_ids.size(1)
    order = routing.topk_ids.flatten().argsort(stable=True)
    weights = routing.topk_weights.flatten()[order].to(x.dtype)
    start = 0
    for expert, count in enumerate(routing.topk_ids.flatten().bincount().tolist()):
        if count:
            rows = slice(start, start + count)
            tokens = order[rows] // top_k
            bias = None if experts.gate_up_bias is None else experts.gate_up_bias[expert]
            inner = ops.linear(x[tokens], experts.gate_up[expert], bias)
            if experts.limit is None:
                inner = ops.silu_and_mul(inner)
            else:
                inner = ops.clamped_swiglu(inner, experts.limit, experts.alpha)
            bias = None if experts.down_bias is None else experts.down_bias[expert]
            y = ops.linear(inner, experts.down[expert], bias) * weights[rows, None]
            out.index_add_(0, tokens, y)
            start += count
    return out
