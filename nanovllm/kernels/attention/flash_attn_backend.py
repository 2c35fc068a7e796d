"""Attention backend that uses the flash-attn package (FlashAttention-2, arXiv:2307.08691)."""

from typing import Any

from torch import Tensor

from nanovllm.kernels.attention.base import AttentionBackend, AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.rope import NewKV
from nanovllm.utils.context import Context


class FlashAttention(AttentionBackend):
    """Uses flash-attn's varlen function for prefill and its KV-cache function for decode.

    Raises:
        ImportError: the package is not installed, or was built for another PyTorch.
    """

    name = "flash_attn"
    features = frozenset(("window", "softcap"))

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen: Any = flash_attn_varlen_func
        self.with_kvcache: Any = flash_attn_with_kvcache

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        context: Context,
        params: AttentionParams,
    ) -> Tensor:
        if context.block_tables is not None:
            k, v = cache.k, cache.v
        return self.varlen(
            q,
            k,
            v,
            cu_seqlens_q=context.cu_seqlens_q,
            cu_seqlens_k=context.cu_seqlens_k,
            max_seqlen_q=max(2, context.max_seqlen_q),  # with 1, each sequence must have a query
            max_seqlen_k=context.max_seqlen_k,
            block_table=context.block_tables,
            **_options(params),
        )

    def decode(
        self,
        q: Tensor,
        cache: KVCache,
        context: Context,
        params: AttentionParams,
        new: NewKV | None = None,
    ) -> Tensor:
        assert new is None
        return self.with_kvcache(
            q.unsqueeze(1),
            cache.k,
            cache.v,
            cache_seqlens=context.context_lens,
            block_table=context.block_tables,
            **_options(params),
        ).squeeze(1)


def _options(params: AttentionParams) -> dict[str, Any]:
    """Returns the arguments of both functions. The package has none for sinks."""
    assert params.sinks is None
    options: dict[str, Any] = {"softmax_scale": params.scale, "causal": True}
    if params.window is not None:
        options["window_size"] = (params.window - 1, 0)
    if params.softcap is not None:
        options["softcap"] = params.softcap
    return options
