"""Helpers for the ``weight_loader`` of layers: checks, and a parameter split by heads."""

from collections.abc import Sequence

import torch
from torch import nn

from nanovllm.utils.distributed import get_tp_group


def copy_weight(target: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copies ``loaded_weight`` to ``target`` and converts its dtype and device. Does not broadcast.

    Raises:
        ValueError: the shapes differ, or the loaded weight is not floating point.
    """
    check_shape(target.shape, loaded_weight)
    if not loaded_weight.is_floating_point():
        raise ValueError(f"dtype {loaded_weight.dtype} is not supported (quantised checkpoint?)")
    target.copy_(loaded_weight)


def check_shape(needed: Sequence[int], loaded_weight: torch.Tensor) -> None:
    """Raises ValueError for a checkpoint tensor of another shape than needed."""
    found = list(loaded_weight.shape)
    if found != list(needed):
        raise ValueError(f"the model needs shape {list(needed)}, got {found}")


def head_parameter(num_heads: int) -> nn.Parameter:
    """Returns an fp32 parameter [num_heads] with a value for each attention head of this rank. Its
    ``weight_loader`` takes the values of all ranks' heads."""
    tp = get_tp_group()

    def weight_loader(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        check_shape((tp.size * num_heads,), loaded_weight)
        copy_weight(param, loaded_weight[tp.rank * num_heads :][:num_heads])

    param = nn.Parameter(torch.zeros(num_heads, dtype=torch.float32))
    param.weight_loader = weight_loader  # type: ignore[attr-defined]
    return param
