"""Paged attention with its prefill by the flash-attn-4 package, which compiles at run time."""

from typing import Any

import torch

from nanovllm.kernels.attention.triton_backend import TritonAttention
from nanovllm.utils.context import Context
from nanovllm.utils.triton_compat import keep_compiled_kernels

MAX_SEQS = 256  # for more, which must be short, it would compile another kernel amid a run
MAX_TILE = 128  # most keys that it loads at once


class FlashAttention4(TritonAttention):
    """flash-attn-4's varlen function for prefill, in fp16 or bf16; our own kernels for decode.

    In a prefill of several whole prompts, values that are not finite may count as the largest that
    are.

    Raises:
        ImportError: the package is not installed.
        ValueError: not a GPU that its paged kernels are for.
    """

    name = "flash_attn_4"

    def __init__(self) -> None:
        super().__init__()
        # What is refused here and below, the package refuses by asserts, so not under python -O.
        if not 9 <= torch.cuda.get_device_capability()[0] <= 11:
            raise ValueError("it needs a GPU of compute capability 9 to 11")
        keep_compiled_kernels()
        from flash_attn.cute import flash_attn_varlen_func

        self.varlen: Any = flash_attn_varlen_func

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        if q.dtype not in (torch.float16, torch.bfloat16) or q.size(2) % 16:
            raise ValueError("it needs fp16 or bf16, and a head_dim that is a multiple of 16")
        bounds_q, bounds_k = context.cu_seqlens_q, context.cu_seqlens_k
        assert bounds_q is not None and bounds_k is not None
        if len(bounds_k) - 1 > MAX_SEQS:
            return super().prefill(q, k, v, k_cache, v_cache, context, scale)
        tables = context.block_tables
        if tables is None:
            keys = {"k": k, "v": v, "cu_seqlens_k": bounds_k}
        elif k_cache.size(1) > MAX_TILE:
            # Of blocks that are no tile each, it reads only the slots that hold keys.
            lens_k = bounds_k.diff()
            keys = {"k": k_cache, "v": v_cache, "seqused_k": lens_k, "page_table": tables}
        else:
            raise ValueError(f"it needs a kvcache_block_size of more than {MAX_TILE}")
        # No max_seqlen_q, a hint for which short prompts would get a kernel of their own.
        out, _ = self.varlen(q, **keys, cu_seqlens_q=bounds_q, softmax_scale=scale, causal=True)
        return out

    def num_finite(self, context: Context) -> int:
        # A sequence's last tile goes on into the next ones, whose values get weight 0: NaN if they
        # are not finite. The largest number instead spoils their own sequence only.
        bounds = context.cu_seqlens_k
        if bounds is None or context.block_tables is not None:
            return 0
        return MAX_TILE - 1 if 1 < len(bounds) - 1 <= MAX_SEQS else 0
