"""The weights of a mixture's experts, as they are stored and multiplied."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.kernels.moe.few import mix_few
from nanovllm.kernels.moe.grouped import mix_grouped
from nanovllm.kernels.moe.mix import mix_reference
from nanovllm.kernels.moe.route import Routing
from nanovllm.utils.distributed import TPGroup
from nanovllm.utils.loader import check_shape, copy_weight
from nanovllm.utils.math import divide
from nanovllm.utils.triton_compat import use_triton

# The kernels by the number of tokens: the first that is launched for as many. With more than 4
# tokens of 8 experts each, out of 128, a seventh of the assignments share an expert. The limit is
# an estimate, not measured yet.
KERNELS = ((range(1, 5), mix_few), (range(sys.maxsize), mix_grouped))


class UnquantizedExperts:
    """Weights in the model's own dtype: gate_up_proj [E, 2 I, hidden], gate above up, and down_proj
    [E, hidden, I], with I columns of each expert on this rank.

    Args:
        layer: the module that the parameters belong to.
        tp: the ranks over which the columns are split.
    """

    def __init__(self, layer: nn.Module, tp: TPGroup) -> None:
        self.layer: Any = layer
        self.tp = tp

    def create_parameters(self, num_experts: int, hidden_size: int, num_columns: int) -> None:
        """Registers the parameters with the layer, without values."""
        inner = divide(num_columns, self.tp.size)
        for name, shape in (
            ("gate_up_proj", (num_experts, 2 * inner, hidden_size)),
            ("down_proj", (num_experts, hidden_size, inner)),
        ):
            param = nn.Parameter(torch.empty(shape), requires_grad=False)
            self.layer.register_parameter(name, param)

    def load(
        self, param: nn.Parameter, tensor: Tensor, shard_id: int | None, expert: int | None
    ) -> None:
        """Copies this rank's columns of a checkpoint tensor: see ``Experts.weight_loader``.

        Raises:
            ValueError: the tensor has another shape than the model needs, or an unknown dtype.
        """
        target: Tensor = param.data
        if param is self.layer.down_proj:
            dim = -1
        else:
            dim = -2
            target = target.unflatten(1, (2, -1))
        if expert is not None:
            target = target[expert]
        if shard_id is not None:
            target = target.select(-3, shard_id)
        needed = list(target.shape)
        needed[dim] *= self.tp.size
        is_both = dim == -2 and shard_id is None
        check_shape([*needed[:-3], 2 * needed[-2], needed[-1]] if is_both else needed, tensor)
        tensor = tensor.view(needed).narrow(dim, self.tp.rank * target.size(dim), target.size(dim))
        copy_weight(target, tensor)

    def mix(self, x: Tensor, routing: Routing, residual: Tensor | None) -> Tensor:
        """Computes the weighted sum of the experts' outputs [N, hidden], plus the residual unless
        it is None."""
        mix = mix_reference
        if use_triton(x):
            mix = next(kernel for rows, kernel in KERNELS if len(x) in rows)
        return mix(x, self.layer.gate_up_proj, self.layer.down_proj, routing, residual)
