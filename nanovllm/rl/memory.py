"""Frees and restores the memory of weights and KV cache, on one rank."""

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.linear import LinearBase
from nanovllm.rl.weights import live_model
from nanovllm.utils.cuda_vmm import arena_of
from nanovllm.utils.memory import release_unused

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = WEIGHTS, KV_CACHE  # vLLM's names for the parts of the memory


class Memory(Protocol):
    """Memory that can be freed while the tensors in it are not used."""

    def release(self, keeps_values: bool) -> None:
        """Frees the memory, and keeps the values in host memory if asked to."""

    def restore(self) -> None:
        """Allocates the memory again, with the values if they were kept."""


class HostMemory:
    """Plain tensors on a CPU. With ``keeps_values``, ``release`` does nothing."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.storages = [tensor.untyped_storage() for tensor in tensors]
        self.sizes = [storage.nbytes() for storage in self.storages]

    def release(self, keeps_values: bool) -> None:
        if not keeps_values:
            for storage in self.storages:
                storage.resize_(0)

    def restore(self) -> None:
        for storage, size in zip(self.storages, self.sizes, strict=True):
            storage.resize_(size)


class HostWeights:
    """The weights of a model on a CPU, some of which are packed for oneDNN."""

    def __init__(self, runner: ModelRunner) -> None:
        self.weights = [
            module.linear_weight
            for module in runner.model.modules()
            if isinstance(module, (LinearBase, VocabParallelEmbedding))
        ]
        self.plain = HostMemory(p for p in runner.model.parameters() if not p.is_mkldnn)

    def release(self, keeps_values: bool) -> None:
        self.plain.release(keeps_values)
        for weight in () if keeps_values else self.weights:
            weight.release()

    def restore(self) -> None:
        self.plain.restore()
        for weight in self.weights:
            weight.restore()


_memories: WeakKeyDictionary[nn.Module, dict[str, Memory]] = WeakKeyDictionary()


def memory_of(runner: ModelRunner, tag: str) -> Memory:
    """Returns the memory of a rank's weights or KV cache."""
    tensor = runner.kv_cache if tag == KV_CACHE else runner.model.model.norm.weight
    if (arena := arena_of(tensor)) is not None:
        return arena
    memories = _memories.setdefault(runner.model, {})
    if tag not in memories:
        memories[tag] = HostMemory([tensor]) if tag == KV_CACHE else HostWeights(runner)
    return memories[tag]


def release(runner: ModelRunner, tag: str, keeps_values: bool) -> None:
    """Every rank: frees the memory of weights or KV cache."""
    memory_of(runner, tag).release(keeps_values)
    if tag == WEIGHTS and not keeps_values:
        live_model(runner).drop_incomplete()
    release_unused(runner.device)


def restore(runner: ModelRunner, tag: str) -> None:
    """Every rank: allocates the memory again."""
    memory_of(runner, tag).restore()
