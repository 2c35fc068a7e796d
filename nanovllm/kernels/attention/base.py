"""The interface of attention backends."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.prefix_schedule import SharedPrefixes
from nanovllm.kernels.rope import NewKV
from nanovllm.utils.context import Context


class AttentionParams(NamedTuple):
    """The parameters of one layer's attention.

    Attributes:
        scale: factor of the scores q k^T.
        window: a token attends to itself and the ``window`` - 1 tokens before it; None if it
            attends to all tokens before it.
        softcap: scaled scores s become softcap * tanh(s / softcap); None for no softcap.
        sinks: fp32 [heads], a learned logit per query head that counts in the softmax's
            denominator only (attention sink); None for no sinks.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


ALL_FEATURES = frozenset(("window", "softcap", "sinks"))


class AttentionBackend(ABC):
    """Softmax attention over the paged KV cache. A backend carries nothing from step to step.

    q is [N, heads, head_dim]. k and v are [N, kv_heads, head_dim]. The cache already holds the keys
    and values of this step, unless ``decode`` gets them in ``new``. heads is a multiple of
    kv_heads, and query head h attends to KV head h * kv_heads // heads. Results have q's shape.

    In a layer with a window, blocks outside of the windows of all queries are not read, so block
    tables need no valid entries for them.

    Attributes:
        name: as in the ``attention_backend`` option.
        capturable: whether CUDA graphs can capture ``prefill`` and ``decode``, which then must not
            synchronise.
        fuses_rope: whether ``decode`` itself applies RoPE, and stores the new keys and values.
        shares_prefixes: whether ``decode`` can read a prefix once for the sequences that share it.
        features: the optional fields of AttentionParams that it supports.
        reads_quantized: whether it can read a quantised KV cache.
        needs_gpu: whether it runs on GPUs only.
    """

    name: ClassVar[str]
    capturable: ClassVar[bool] = True
    fuses_rope: ClassVar[bool] = False
    shares_prefixes: ClassVar[bool] = False
    features: ClassVar[frozenset[str]] = ALL_FEATURES
    reads_quantized: ClassVar[bool] = False
    needs_gpu: ClassVar[bool] = True

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        return device.type == "cuda" or not cls.needs_gpu

    def max_captured_prefill(self, is_quantized: bool) -> tuple[int, int]:
        """Returns the most tokens, and the most sequences, of the prefills to capture in CUDA
        graphs. In a graph, ``prefill`` does not know the lengths of sequences. In a large one, this
        may cost more time than the graph saves.

        Args:
            is_quantized: whether the cache is quantised.
        """
        return 4096, 64

    @abstractmethod
    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        context: Context,
        params: AttentionParams,
    ) -> Tensor:
        """Computes causal attention of the last tokens of each sequence over its context.

        A sequence may have any number of queries, or none, and its context may be empty. Keys
        come from the cache if the context has block tables, otherwise from k and v, where
        ``context.cu_seqlens_k`` delimits sequences. They always come from a quantised cache, so
        that a token attends to the same keys and values as later tokens do. Result rows after the
        last sequence are undefined."""

    def split_kv(
        self,
        context_lens: np.ndarray,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        is_quantized: bool,
        window: int | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> np.ndarray | None:
        """Computes the split-KV schedule of a decode step, on the host. Layers with the same
        ``window`` share it.

        Args:
            context_lens: int32 [num_seqs].
            dtype: of the queries.
            is_quantized: whether the cache is quantised.
            prefixes: prefixes to read once; None for a step that shares none.

        Returns:
            ``context.split_kv_schedule``. Its shape depends only on num_seqs and on whether
            ``prefixes`` is None. None if the backend needs no schedule.
        """
        return None

    @abstractmethod
    def decode(
        self,
        q: Tensor,
        cache: KVCache,
        context: Context,
        params: AttentionParams,
        new: NewKV | None = None,
    ) -> Tensor:
        """Computes attention of one new token per sequence over ``context.context_lens`` tokens,
        the new one included.

        Args:
            q: after RoPE, unless ``new`` is given.
            new: keys and values of the new tokens, before RoPE. Only backends with ``fuses_rope``
                take it. They apply RoPE to q and the new keys, and store keys and values.
        """
