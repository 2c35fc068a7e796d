"""Moves checkpoint tensors into a model's parameters, and accounts for every one of them."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

import torch
from torch import nn
from tqdm.auto import tqdm

LARGE_BYTES = 10**9


def default_weight_loader(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """Copies a whole tensor into a parameter of the same shape."""
    copy_weight(param.data, loaded_weight)


def copy_weight(target: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copies, converting dtype and device; refuses to broadcast or to convert integers.

    Raises:
        ValueError: another shape than the target's, or not floating point.
    """
    check_shape(target.shape, loaded_weight)
    if not loaded_weight.is_floating_point():
        raise ValueError(f"dtype {loaded_weight.dtype} is not served (quantised checkpoint?)")
    target.copy_(loaded_weight)


def check_shape(needed: Sequence[int], loaded_weight: torch.Tensor) -> None:
    """Raises ValueError for a checkpoint tensor of another shape than needed."""
    found = list(loaded_weight.shape)
    if found != list(needed):
        raise ValueError(f"the model needs shape {list(needed)}, the checkpoint has {found}")


class LoadableModel(Protocol):
    """What ``load_model`` asks of a model besides its parameters."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]]

    def is_redundant_weight(self, name: str) -> bool: ...

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


def load_model(
    model: LoadableModel, tensors: Iterable[tuple[str, torch.Tensor]], shows_bar: bool = False
) -> None:
    """Streams (name, tensor) pairs into the model. ``shows_bar`` shows a progress bar for over 1 GB
    of parameters, in a terminal.

    A parameter's own ``weight_loader(param, tensor[, shard_id])`` places what it is given.
    ``model.packed_modules_mapping`` sends a checkpoint module to a shard of a packed one:
    ``{"q_proj": ("qkv_proj", "q"), ...}``. ``model.is_redundant_weight(name)`` says which
    names may be left over.

    Raises:
        ValueError: a tensor that fits no parameter, comes twice or has the wrong shape; or a
            parameter that nothing filled. The message names them.
    """
    # What has to come, by the checkpoint's names: a packed parameter waits for each of its parts.
    expected: dict[str, tuple[nn.Parameter, tuple[str | int, ...]]] = {}
    for name, param in model.named_parameters():
        expected[name] = param, ()
        for source, (target, shard_id) in model.packed_modules_mapping.items():
            if f".{target}." in name:
                expected.pop(name, None)
                expected[name.replace(f".{target}.", f".{source}.")] = param, (shard_id,)
    missing, leftover = set(expected), []
    if shows_bar and sum(param.nbytes for _, param in model.named_parameters()) > LARGE_BYTES:
        tensors = tqdm(tensors, "Loading weights", len(expected), unit=" tensors", disable=None)
    for name, tensor in tensors:
        if name not in expected:
            if not model.is_redundant_weight(name):
                leftover.append(name)
            continue
        if name not in missing:
            raise ValueError(f"checkpoint tensor {name} comes twice")
        missing.remove(name)
        param, shard_ids = expected[name]
        try:
            getattr(param, "weight_loader", default_weight_loader)(param, tensor, *shard_ids)
        except ValueError as error:
            raise ValueError(f"checkpoint tensor {name}: {error}") from None
    problems = []
    if missing:
        problems.append(f"lacks {_some(missing)}")
    if leftover:
        problems.append(f"has {_some(leftover)}, for which the model has no place")
    if problems:
        raise ValueError(f"the checkpoint does not fit its config: it {' and '.join(problems)}")


def _some(names: Iterable[str], limit: int = 5) -> str:
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
