"""Loads a checkpoint's tensors into a model's parameters. Reports missing and unknown tensors."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.multimodal import PREFIXES
from nanovllm.models.weight_names import WeightNames
from nanovllm.utils.loader import copy_weight

logger = logging.getLogger("nanovllm")

LARGE_BYTES = 10**9


@torch.no_grad()
def load_model(
    model: DecoderForCausalLM, tensors: Iterable[tuple[str, torch.Tensor]], shows_bar: bool = False
) -> None:
    """Loads the weights of all parameters. May be called again with other weights.

    A parameter with a method ``weight_loader(param, tensor[, shard_id])`` is loaded by that method.

    Args:
        model: the model, whose ``weight_names`` map names in the checkpoint to parameters.
        tensors: the name and value of each tensor in the checkpoint, in any order. Tensors that
            match ``weight_names.skipped`` are ignored.
        shows_bar: whether to show a progress bar, in a terminal, for over 1 GB of parameters.

    Raises:
        ValueError: a tensor belongs to no parameter, occurs twice or has the wrong shape, or a
            parameter has no tensor. The message names them.
    """
    expected, needed = _expected_tensors(dict(model.named_parameters()), model.weight_names)
    leftover: list[str] = []
    if shows_bar and sum(param.nbytes for param in model.parameters()) > LARGE_BYTES:
        count = sum(len(ways[0]) for ways in needed.values())
        tensors = tqdm(tensors, "Loading weights", count, unit=" tensors", disable=None)
    skipped: Counter[str] = Counter()
    for hub_name, tensor in tensors:
        if patterns := [p for p in model.weight_names.skipped if fnmatchcase(hub_name, p)]:
            skipped[patterns[0]] += 1
            continue
        name = _replace_prefix(hub_name)
        if name not in expected:
            leftover.append(name)
            continue
        parameter, load = expected[name]
        needed[parameter] = [names for names in needed[parameter] if name in names]
        if not needed[parameter]:
            raise ValueError(f"checkpoint tensor {name} occurs twice, under this or another name")
        for names in needed[parameter]:
            names.remove(name)
        try:
            load(tensor)
        except ValueError as error:
            raise ValueError(f"checkpoint tensor {name}: {error}") from None
    missing = set[str]().union(*(ways[0] for ways in needed.values()))
    if skipped:
        logger.info("skipped %d tensors: %s", skipped.total(), ", ".join(skipped))
    problems = []
    if missing:
        problems.append(f"lacks {_some(missing)}")
    if leftover:
        problems.append(f"has {_some(leftover)}, which the model does not have")
    if problems:
        raise ValueError(f"the checkpoint does not fit its config: it {' and '.join(problems)}")


def fill_with_dummy_weights(model: nn.Module, seed: int) -> None:
    """Fills parameters of two or more dimensions with samples from a normal distribution with
    standard deviation 0.02, and biases of one dimension with 0. Norm weights stay 1. A parameter
    with a method ``fill_with_dummy_weights(param, generator)`` is filled by that method."""
    params = dict(model.named_parameters())
    generator = torch.Generator(next(iter(params.values())).device).manual_seed(seed)
    for name, param in params.items():
        if hasattr(param, "fill_with_dummy_weights"):
            param.fill_with_dummy_weights(param, generator)
        elif param.dim() > 1:
            param.normal_(0, 0.02, generator=generator)
        elif name.endswith("bias"):
            param.zero_()


def _expected_tensors(
    params: dict[str, nn.Parameter], names: WeightNames
) -> tuple[dict[str, tuple[str, Callable[[torch.Tensor], Any]]], dict[str, list[set[str]]]]:
    """Returns what to do with the tensors of a checkpoint.

    Returns:
        expected: by the tensor's name, its parameter's name and the function that loads it.
        needed: by the parameter's name, the sets of tensors that fill it. There are several sets if
            checkpoints store the parameter in different ways.
    """
    expected = {}
    parts: dict[str, set[str]] = {}
    wholes: dict[str, list[set[str]]] = {}
    for tensor, parameter, shard_id, indices in expand(names):
        if parameter in params:
            expected[tensor] = parameter, _loader(params[parameter], *shard_id, **indices)
            if shard_id or indices:
                parts.setdefault(parameter, set()).add(tensor)
            else:
                wholes.setdefault(parameter, []).append({tensor})
    for name in params.keys() - parts.keys() - wholes.keys():
        expected[name], wholes[name] = (name, _loader(params[name])), [{name}]
    needed = {name: [parts.get(name, set()), *wholes.get(name, [])] for name in params}
    needed = {name: [names for names in ways if names] for name, ways in needed.items()}
    return expected, needed


def _replace_prefix(name: str) -> str:
    for prefix, replacement in PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def _loader(param: nn.Parameter, *shard_id: Any, **indices: Any) -> Callable[[torch.Tensor], Any]:
    load = getattr(param, "weight_loader", copy_weight)
    return lambda tensor: load(param, tensor, *shard_id, **indices)


def expand(names: WeightNames) -> Iterator[tuple[str, str, list[Any], dict[str, Any]]]:
    """Yields the names that the patterns in ``names`` stand for.

    Yields:
        A tensor's name; its parameter's name; a list with the shard id if there is one; and the
        values of the fields in braces that the tensor's pattern has and the parameter's does not.
    """
    for tensor, parameter, *shard_id in names.rows:
        fields = [field for field in names.fields if f"{{{field}}}" in tensor]
        for values in product(*(names.fields[field] for field in fields)):
            chosen = dict(zip(fields, values, strict=True))
            extra = {f: v for f, v in chosen.items() if f"{{{f}}}" not in parameter}
            yield tensor.format(**chosen), parameter.format(**chosen), shard_id, extra


def _some(names: Iterable[str], limit: int = 5) -> str:
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
