"""A mixture of experts as a layer's MLP (Shazeer et al. 2017, arXiv:1701.06538).

Experts are split like a dense MLP: each tensor-parallel rank holds a slice of the intermediate
dimension of every expert. N is the number of tokens in the step, and I the size of that slice.
"""

from collections.abc import Callable

import torch
from torch import nn

from nanovllm.kernels.moe.route import route
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import ReplicatedLinear
from nanovllm.quantization.base import is_batch_invariant, use_quantization
from nanovllm.quantization.experts import new_expert_weights
from nanovllm.utils.distributed import RankPart, get_tp_group


class Experts(nn.Module):
    """The weights of all experts on this rank. The arguments are those of a ``MoESpec``.

    ``gate_up_proj`` is [num_experts, 2 I, hidden_size]: the rows of gate, then those of up.
    ``down_proj`` is [num_experts, hidden_size, I]. Their biases are ``gate_up_proj_bias`` and
    ``down_proj_bias``.

    Each parameter has an attribute ``active_share``: the fraction of the experts that a token uses.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        intermediate_size: int,
        bias: bool,
        limit: float | None,
        alpha: float,
        interleaved: bool,
        mxfp4: bool,
    ) -> None:
        super().__init__()
        self.weights = new_expert_weights(self, limit, alpha, interleaved, mxfp4)
        self.weights.create_parameters(num_experts, hidden_size, intermediate_size, bias)
        for param in self.parameters():
            param.weight_loader = self.weight_loader  # type: ignore[attr-defined]
            param.active_share = top_k / num_experts  # type: ignore[attr-defined]

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        shard_id: int | str | None = None,
        expert: int | None = None,
    ) -> None:
        """Copies this rank's slice of a checkpoint tensor into a parameter.

        Args:
            loaded_weight: the weights of all experts, or of one if ``expert`` is its index.
            shard_id: 0 for gate and 1 for up, if ``loaded_weight`` is only one of them; "blocks"
                or "scales" for a part of MXFP4 weights.
        """
        self.weights.load(param, loaded_weight, shard_id, expert)


class MoE(nn.Module):
    """Routes each token to ``top_k`` experts and sums their outputs. The arguments are those of a
    ``MoESpec``."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        intermediate_size: int,
        norm_topk_prob: bool,
        bias: bool = False,
        limit: float | None = None,
        alpha: float = 1.0,
        interleaved: bool = False,
        mxfp4: bool = False,
    ) -> None:
        super().__init__()
        self.tp = get_tp_group()
        self.top_k, self.norm_topk_prob = top_k, norm_topk_prob
        self.always_sorts = is_batch_invariant()
        with use_quantization(None):  # routing depends on small differences
            self.gate = ReplicatedLinear(hidden_size, num_experts, bias)
        sizes = hidden_size, num_experts, top_k, intermediate_size
        self.experts = Experts(*sizes, bias, limit, alpha, interleaved, mxfp4)

    def forward(
        self,
        x: torch.Tensor | RankPart,
        residual: torch.Tensor | None,
        norm: RMSNorm,
        output_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor | RankPart, torch.Tensor | None]:
        """Computes output_norm(mixture(norm(x + residual))).

        Returns:
            The result and the new residual, or their sum and None: see
            ``RowParallelLinear.forward_add``.
        """
        x, logits, residual = self.gate.linear_weight.norm_and_matmul(x, residual, norm)
        routing = route(logits, self.top_k, self.norm_topk_prob, self.always_sorts)
        if self.tp.size == 1 and output_norm is None:
            return self.experts.weights.apply(x, routing, residual), None
        x = self.experts.weights.apply(x, routing, None)
        if output_norm is None:
            return self.tp.all_reduce_before_norm(x), residual
        return output_norm(self.tp.all_reduce(x)), residual
