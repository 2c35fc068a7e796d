"""Attention backend with prefill by the flash-attn-4 package, which compiles at run time."""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.attention.base import AttentionParams
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.attention.triton_backend import TritonAttention
from nanovllm.utils.context import Context
from nanovllm.utils.triton_compat import keep_compiled_kernels

MAX_SEQS = 256  # flash-attn-4 would compile another kernel for more, in the middle of a run
MAX_TILE = 128  # the largest number of keys in a tile of flash-attn-4


class FlashAttention4(TritonAttention):
    """Uses flash-attn-4's varlen function for prefill, in fp16 or bf16, and Triton for decode and
    for layers with a window, a softcap or sinks.

    A prefill of several prompts without block tables may treat NaN and infinite values as the
    largest finite numbers.

    Raises:
        ImportError: the package is not installed.
        ValueError: the package has no paged kernels for this GPU.
    """

    name = "flash_attn_4"
    reads_quantized = False

    def __init__(self) -> None:
        super().__init__()
        # The package itself checks this, and the requirements below, with assert statements only.
        if not 9 <= torch.cuda.get_device_capability()[0] <= 11:
            raise ValueError("it needs a GPU of compute capability 9 to 11")
        keep_compiled_kernels()
        from flash_attn.cute import flash_attn_varlen_func

        self.varlen: Any = flash_attn_varlen_func

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        context: Context,
        params: AttentionParams,
    ) -> Tensor:
        if q.dtype not in (torch.float16, torch.bfloat16) or q.size(2) % 16:
            raise ValueError("it needs fp16 or bf16, and a head_dim that is a multiple of 16")
        bounds_q, bounds_k = context.cu_seqlens_q, context.cu_seqlens_k
        assert bounds_q is not None and bounds_k is not None
        if len(bounds_k) - 1 > MAX_SEQS or params != AttentionParams(params.scale):
            return super().prefill(q, k, v, cache, context, params)
        tables = context.block_tables
        if tables is None:
            keys = {"k": k, "v": v, "cu_seqlens_k": bounds_k}
        elif cache.k.size(1) > MAX_TILE:
            # With blocks of at most a tile, flash-attn-4 may read slots without keys, perhaps NaN.
            lens_k = bounds_k.diff()
            keys = {"k": cache.k, "v": cache.v, "seqused_k": lens_k, "page_table": tables}
        else:
            raise ValueError(f"it needs a kvcache_block_size of more than {MAX_TILE}")
        # max_seqlen_q is left out: with it, flash-attn-4 compiles another kernel for short prompts.
        out, _ = self.varlen(
            q, **keys, cu_seqlens_q=bounds_q, softmax_scale=params.scale, causal=True
        )
        return out

    def clamp_end(self, context: Context) -> int:
        # A sequence's last tile also loads the first values of the next sequences, with weight 0.
        # If these are NaN or inf, 0 * inf makes the sequence's result NaN. Finite values do not.
        bounds = context.cu_seqlens_k
        if bounds is None or context.block_tables is not None:
            return 0
        return MAX_TILE - 1 if 1 < len(bounds) - 1 <= MAX_SEQS else 0
