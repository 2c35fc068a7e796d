"""What a layer's ``weight_loader`` checks before it copies a checkpoint tensor."""

from collections.abc import Sequence

import torch


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
        raise ValueError(f"the model needs shape {list(needed)}, the checkpoint has {found}")
