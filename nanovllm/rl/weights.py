"""Loads tensors into the parameters of a running engine, on all ranks."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nanovllm.checkpoints.weights import LoadingPass, Slot, WeightTable, some_of
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase
from nanovllm.quantization.base import LinearWeight
from nanovllm.utils.interrupts import interrupts_delayed


class LiveModel:
    """A model on one rank, whose weights have been loaded and packed.

    Attributes:
        table: the tensors that it takes.
        packed: by the parameter's name, the weights that ``pack`` derives from it.
        experts: by the module's name, the weights of experts: see ``quantization/experts.py``.
    """

    def __init__(self, model: Any) -> None:
        self.table = WeightTable(model)
        names = {id(param): name for name, param in model.named_parameters()}
        self.packed: dict[str, list[LinearWeight]] = {name: [] for name in names.values()}
        # Not found by their class, because only models with experts import it.
        self.experts: dict[str, Any] = {
            name: module.weights
            for name, module in model.named_modules()
            if hasattr(module, "weights")
        }
        for module in model.modules():
            if isinstance(module, (LinearBase, ParallelLMHead)):
                for param in module.parameters(recurse=False):
                    self.packed[names[id(param)]].append(module.linear_weight)

    def pack(self, slot: Slot) -> None:
        """Brings what was packed up to date after a tensor has been loaded."""
        for weight in self.packed[slot.parameter]:
            weight.pack()

    def incomplete(self) -> dict[str, str]:
        """Returns the tensors that wait for another before they are loaded, each with the other's
        name: MXFP4 blocks without scales, or scales without blocks."""
        return {
            f"{prefix}.{name}": f"{prefix}.{other}"
            for prefix, experts in self.experts.items()
            for name, other in experts.incomplete().items()
        }

    def drop_incomplete(self) -> None:
        for experts in self.experts.values():
            experts.drop_incomplete()


_live: WeakKeyDictionary[nn.Module, LiveModel] = WeakKeyDictionary()


def live_model(runner: ModelRunner) -> LiveModel:
    """Returns this rank's cached LiveModel."""
    if runner.model not in _live:
        _live[runner.model] = LiveModel(runner.model)
    return _live[runner.model]


class SentTensor:
    """A contiguous tensor on rank 0's device that the other ranks receive by a broadcast. Pickling
    keeps only shape and dtype; the values are broadcast."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def __getstate__(self) -> dict[str, Any]:
        return {"tensor": None, "shape": self.shape, "dtype": self.dtype}

    def broadcast(self, runner: ModelRunner) -> torch.Tensor:
        """Every rank: sends or receives the tensor. Returns it, on the runner's device."""
        if self.tensor is None:
            tensor = torch.empty(self.shape, dtype=self.dtype, device=runner.device)
        else:
            tensor = self.tensor
        if tensor.numel():
            runner.tp.broadcast(tensor.flatten().view(torch.uint8))
        return tensor


def receive(runner: ModelRunner, name: str, sent: SentTensor) -> None:
    """Every rank: takes part in the broadcast of a tensor. The ranks other than 0 load it."""
    tensor = sent.broadcast(runner)
    if runner.tp.rank > 0:
        live = live_model(runner)
        slot = live.table.find(name)
        assert slot is not None, "rank 0 has checked the name"
        slot.load(tensor)
        live.pack(slot)


def load_here(runner: ModelRunner, loading: LoadingPass, slot: Slot, tensor: torch.Tensor) -> None:
    """Rank 0: checks a tensor and loads it on this rank."""
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        raise ValueError(f"{slot.tensor} is {tensor.dtype}: dequantise it, with its scales")
    loading.load(slot, tensor)
    live_model(runner).pack(slot)


class MissingWeights:
    """The weights that have no values: none, or all until they are loaded.

    Attributes:
        incomplete: the tensors that others wait for: see ``LiveModel.incomplete``.
        alternatives: as ``WeightTable.alternatives``, without the tensors that have been loaded,
            for the parameters that are not complete.
    """

    def __init__(self) -> None:
        self.alternatives: dict[str, list[set[str]]] = {}
        self.incomplete: set[str] = set()

    def add_all(self, table: WeightTable) -> None:
        self.incomplete = set()
        self.alternatives = {
            name: [set(names) for names in sets] for name, sets in table.alternatives.items()
        }

    def remove(self, slot: Slot) -> None:
        """Notes that a tensor has been loaded."""
        sets = self.alternatives.get(slot.parameter, [])
        for names in sets:
            names.discard(slot.tensor)
        if sets and not all(sets):
            del self.alternatives[slot.parameter]

    def names(self) -> set[str]:
        """Returns the tensors that have to be loaded."""
        return set[str]().union(*(sets[0] for sets in self.alternatives.values()))


class WeightUpdate:
    """Rank 0: loads tensors into the model of all ranks, each at most once.

    A tensor is checked on rank 0 before anything is sent to the other ranks.

    Args:
        missing: the weights without values, from which those that are loaded are removed.

    Attributes:
        loaded: the slots of the tensors that have been loaded on all ranks, by name.
        current: the name of the tensor that is being loaded, until it has been loaded or refused.
    """

    def __init__(self, runner: ModelRunner, missing: MissingWeights) -> None:
        self.runner, self.missing = runner, missing
        self.live = live_model(runner)
        self.loading = LoadingPass(self.live.table)
        self.loaded: dict[str, Slot] = {}
        self.current: str | None = None

    def find(self, name: str) -> Slot | None:
        """Returns a tensor's slot; None if the model does not need the tensor.

        Raises:
            ValueError: the model has no such tensor.
        """
        slot = self.loading.table.find(name)
        if slot is None and self.loading.table.skip_pattern(name) is None:
            raise ValueError(f"the model has no tensor {name}")
        return slot

    def check_names(self, pairs: Collection[Any]) -> None:
        """Checks the names of all pairs, and loads nothing.

        Raises:
            TypeError, ValueError: as ``load``, but shapes and dtypes are not checked.
        """
        check = LoadingPass(self.loading.table)
        with self._described():
            for pair in pairs:
                slot = self.find(_checked(pair)[0])
                if slot is not None:
                    check.take(slot)

    def load(self, pair: Any) -> None:
        """Loads a tensor on all ranks, given as a pair of a name and a tensor.

        Raises:
            TypeError: it is not such a pair.
            ValueError: the name is unknown or was loaded before, or the shape or dtype is wrong.
                This tensor has changed nothing.
        """
        several = self.runner.tp.size > 1
        with self._described(), interrupts_delayed() if several else nullcontext():
            name, tensor = _checked(pair)
            if (slot := self.find(name)) is None:
                return
            if several:  # before any rank waits for it, because a copy can run out of memory
                tensor = tensor.detach().to(self.runner.device).resolve_neg().contiguous()
            self.current = name
            try:
                self.runner.apply(None, load_here, self.loading, slot, tensor)
            except ValueError:
                self.current = None
                raise
            if several:
                self.runner.call("apply", None, receive, name, SentTensor(tensor))
            self.current = None
            self.loaded[slot.tensor] = slot
            self.missing.remove(slot)

    def read(self, pairs: Iterable[Any]) -> Iterator[Any]:
        """Yields the pairs. An error of the iterator gets a note about what has been changed."""
        try:
            yield from pairs
        except BaseException as error:
            error.add_note(f"load_weights: {self.describe()}")
            raise

    def describe(self) -> str:
        """Says what has been changed, for a message."""
        incomplete = self.live.incomplete()
        text = "no weight was changed"
        if loaded := self.loaded.keys() - incomplete.keys():
            plural = "tensors were" if len(loaded) > 1 else "tensor was"
            text = f"{len(loaded)} {plural} loaded before ({some_of(loaded)})"
            text += ", and all others keep their values"
        for name, other in incomplete.items():
            text += f", {name} is loaded when {other} is given"
        if self.current is not None:
            text += f", but {self.current} may be loaded in part"
        return text

    @contextmanager
    def _described(self) -> Iterator[None]:
        """Adds to errors what has been changed."""
        try:
            yield
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{error}; {self.describe()}") from None
        except BaseException as error:
            error.add_note(f"load_weights: {self.describe()}")
            raise


def _checked(pair: Any) -> tuple[str, torch.Tensor]:
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], torch.Tensor):
        raise TypeError(
            f"load_weights needs pairs of a name and a tensor, such as state_dict().items(), got "
            f"{pair!r:.80}"
        )
    name, tensor = pair
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        raise ValueError(
            f"{name} needs a dense tensor with values, got layout {tensor.layout} on device "
            f"{tensor.device}"
        )
    return name, tensor
