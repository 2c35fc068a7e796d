"""The experts' SwiGLU MLPs and the sum of their outputs, in plain PyTorch: the CPU path, and the
reference of the kernels."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference


def mix_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Computes each expert for the tokens routed to it, and adds the outputs.

    Args:
        x: [N, hidden].
        gate_up: [E, 2 I, hidden], gate above up.
        down: [E, hidden, I].
        residual: [N, hidden], added to the result; None for zero.

    Returns:
        [N, hidden].
    """
    out = torch.zeros_like(x) if residual is None else residual.clone()
    top_k = routing.experts.size(1)
    order = routing.experts.flatten().argsort(stable=True)
    weights = routing.weights.flatten()[order].to(x.dtype)
    start = 0
    for expert, count in enumerate(routing.counts.sum(0).tolist()):
        if count:
            rows = slice(start, start + count)
            tokens = order[rows] // top_k
            inner = silu_and_mul_reference(F.linear(x[tokens], gate_up[expert]))
            y = F.linear(inner, down[expert]) * weights[rows, None]
            out.index_add_(0, tokens, y)
            start += count
    return out
