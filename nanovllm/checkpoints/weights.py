"""Loads a checkpoint's tensors into a model's parameters. Reports missing and unknown tensors."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm.auto import tqdm

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.multimodal import PREFIXES
from nanovllm.models.weight_names import WeightNames
from nanovllm.utils.loader import copy_weight

logger = logging.getLogger("nanovllm")

LARGE_BYTES = 10**9


class Slot(NamedTuple):
    """Where a checkpoint tensor goes.

    Attributes:
        tensor: its name, without the prefix that multimodal checkpoints add.
        parameter: the name of the parameter of which it fills a part or the whole.
        load: copies a tensor there. If it raises ValueError, it has changed nothing.
    """

    tensor: str
    parameter: str
    load: Callable[[torch.Tensor], Any]


class WeightTable:
    """The checkpoint tensors that a model takes.

    It refers to the model's parameters, so it is valid until one of them is replaced.

    Attributes:
        skipped: the patterns of ``WeightNames.skipped``.
        slots: by the tensor's name, its slot.
        alternatives: by the parameter's name, the sets of tensors that fill it. There are several
            sets if checkpoints store the parameter in different ways.
    """

    def __init__(self, model: DecoderForCausalLM) -> None:
        self.skipped = model.weight_names.skipped
        params = dict(model.named_parameters())
        self.slots, self.alternatives = _expected_tensors(params, model.weight_names)

    def find(self, hub_name: str) -> Slot | None:
        """Returns the slot of a tensor, by its name in a checkpoint; None if it has none."""
        return self.slots.get(hub_name) or self.slots.get(replace_prefix(hub_name))

    def skip_pattern(self, hub_name: str) -> str | None:
        """Returns the pattern that says that a tensor without a slot is not needed; None if none
        does."""
        return next((p for p in self.skipped if fnmatchcase(hub_name, p)), None)


class LoadingPass:
    """Loads tensors, each at most once.

    Attributes:
        remaining: the sets of ``WeightTable.alternatives`` that may still be completed, without the
            tensors that have been loaded. Parameters of which none has been loaded are left out.
    """

    def __init__(self, table: WeightTable) -> None:
        self.table = table
        self.remaining: dict[str, list[set[str]]] = {}

    def load(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Loads a tensor.

        Raises:
            ValueError: it has been loaded before, perhaps under another name or as parts, or it has
                a wrong shape or dtype. No parameter was changed, but the tensor counts as loaded.
        """
        self.take(slot)
        try:
            slot.load(tensor)
        except ValueError as error:
            raise ValueError(f"checkpoint tensor {slot.tensor}: {error}") from None

    def take(self, slot: Slot) -> None:
        """Notes that a tensor is loaded. Raises ValueError if it has been loaded before."""
        name, ways = slot.tensor, self.remaining.get(slot.parameter)
        if ways is None:
            ways = [set(names) for names in self.table.alternatives[slot.parameter]]
        ways = [names for names in ways if name in names]
        if not ways:
            raise ValueError(f"checkpoint tensor {name} occurs twice, under this or another name")
        for names in ways:
            names.remove(name)
        self.remaining[slot.parameter] = ways

    def missing(self) -> set[str]:
        """Returns the tensors that have not been loaded."""
        ways = {**self.table.alternatives, **self.remaining}
        return set[str]().union(*(names[0] for names in ways.values()))


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
    table = WeightTable(model)
    loading = LoadingPass(table)
    leftover: list[str] = []
    if shows_bar and sum(param.nbytes for param in model.parameters()) > LARGE_BYTES:
        count = len(loading.missing())
        tensors = tqdm(tensors, "Loading weights", count, unit=" tensors", disable=None)
    skipped: Counter[str] = Counter()
    for hub_name, tensor in tensors:
        if (slot := table.find(hub_name)) is not None:
            loading.load(slot, tensor)
        elif (pattern := table.skip_pattern(hub_name)) is not None:
            skipped[pattern] += 1
        else:
            leftover.append(replace_prefix(hub_name))
    missing = loading.missing()
    if skipped:
        logger.info("skipped %d tensors: %s", skipped.total(), ", ".join(skipped))
    problems = []
    if missing:
        problems.append(f"lacks {some_of(missing)}")
    if leftover:
        problems.append(f"has {some_of(leftover)}, which the model does not have")
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
) -> tuple[dict[str, Slot], dict[str, list[set[str]]]]:
    """Returns ``WeightTable.slots`` and ``WeightTable.alternatives``."""
    slots = {}
    parts: dict[str, set[str]] = {}
    wholes: dict[str, list[set[str]]] = {}
    for tensor, parameter, shard_id, indices in expand(names):
        if parameter in params:
            load = _loader(params[parameter], *shard_id, **indices)
            slots[tensor] = Slot(tensor, parameter, load)
            if shard_id or indices:
                parts.setdefault(parameter, set()).add(tensor)
            else:
                wholes.setdefault(parameter, []).append({tensor})
    for name in params.keys() - parts.keys() - wholes.keys():
        slots[name], wholes[name] = Slot(name, name, _loader(params[name])), [{name}]
    ways = {name: [parts.get(name, set()), *wholes.get(name, [])] for name in params}
    return slots, {name: [names for names in sets if names] for name, sets in ways.items()}


def replace_prefix(name: str) -> str:
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


def some_of(names: Iterable[str]) -> str:
    """Returns the first five names in alphabetical order, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
