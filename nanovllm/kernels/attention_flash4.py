"""Paged attention with its prefill by the flash-attn-4 package, which compiles at run time."""

import os
from pathlib import Path
from typing import Any

import torch

from nanovllm.kernels.attention_triton import TritonAttention
from nanovllm.kernels.compat import chained, tl, triton, use_triton
from nanovllm.utils.context import Context

MAX_SEQS = 256  # for more, which must be short, it would compile another kernel amid a run
MAX_TILE = 128  # most keys that it loads at once


class FlashAttention4(TritonAttention):
    """flash-attn-4's varlen function for prefill, in fp16 or bf16; our own kernels for decode.

    In a prefill of whole prompts, values that are not finite count as the largest that are.

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
        # Kernels are kept, not compiled again at each start; by itself it would keep them in /tmp,
        # where anyone could have put some for us to load. Read when it is imported.
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache / "flash_attn_4"))
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
        if len(bounds_q) - 1 > MAX_SEQS:
            return super().prefill(q, k, v, k_cache, v_cache, context, scale)
        tables = context.block_tables
        if tables is None:
            # A sequence's last tile goes on into the next sequence, whose values get weight 0: NaN
            # where they are not finite. The largest number instead spoils their own sequence only.
            make_finite(v)
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


@triton.jit
def _make_finite_kernel(
    v_ptr, stride, num_tokens, LARGEST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    address = v_ptr + token.to(tl.int64) * stride + column
    mask = (token < num_tokens) & (column < WIDTH)
    v = tl.load(address, mask=mask, other=0.0)
    is_wrong = ~(tl.abs(v.to(tl.float32)) <= LARGEST)  # or NaN
    largest = tl.where(v < 0, -LARGEST, LARGEST).to(v.dtype)
    tl.store(address, largest, mask=mask & is_wrong)


def make_finite(v: torch.Tensor) -> None:
    """Puts the largest finite number of its type in place of NaN and inf, the smallest for -inf, in
    v [N, kv_heads, head_dim], whose tokens may be strided. Writes nothing else."""
    largest = torch.finfo(v.dtype).max
    if not use_triton(v):
        torch.nan_to_num_(v, nan=largest)
        return
    num_tokens, kv_heads, head_dim = v.shape
    width, tokens = kv_heads * head_dim, 4
    assert v.stride()[1:] == (head_dim, 1)
    _make_finite_kernel[(triton.cdiv(num_tokens, tokens),)](
        v,
        v.stride(0),
        num_tokens,
        LARGEST=largest,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        TOKENS=tokens,
        num_warps=4,
        **chained(v),
    )
