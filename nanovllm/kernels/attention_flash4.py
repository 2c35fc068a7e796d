"""Paged attention with its prefill by the flash-attn-4 package, which compiles at run time."""

from typing import Any

import torch

from nanovllm.kernels.attention_triton import TritonAttention
from nanovllm.kernels.compat import chained, keep_compiled_kernels, tl, triton
from nanovllm.utils.context import Context

MAX_SEQS = 256  # for more, which must be short, it would compile another kernel amid a run
MAX_TILE = 128  # most keys that it loads at once


class FlashAttention4(TritonAttention):
    """flash-attn-4's varlen function for prefill, in fp16 or bf16; our own kernels for decode.

    In a prefill of whole prompts, values that are not finite may count as the largest that are.

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
        if len(bounds_q) - 1 > MAX_SEQS:
            return super().prefill(q, k, v, k_cache, v_cache, context, scale)
        tables = context.block_tables
        if tables is None:
            # A sequence's last tile goes on into the next ones, whose values get weight 0: NaN if
            # they are not finite. The largest number instead spoils their own sequence only.
            if len(bounds_k) > 2:
                make_finite(v, bounds_k, MAX_TILE - 1)
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


@triton.jit(do_not_specialize=["num_tokens"])
def _make_finite_kernel(
    v_ptr,
    bounds_ptr,
    stride,
    num_tokens,
    NUM_TOKENS: tl.constexpr,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    offset = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    token = tl.load(bounds_ptr + 1 + tl.program_id(0)) + offset
    column = tl.arange(0, BLOCK)[None, :]
    address = v_ptr + token.to(tl.int64) * stride + column
    mask = (offset < NUM_TOKENS) & (token < num_tokens) & (column < WIDTH)
    v = tl.load(address, mask=mask, other=0.0).to(tl.float32)
    is_wrong = ~(tl.abs(v) <= LARGEST)  # or NaN
    largest = tl.where(v < 0, -LARGEST, LARGEST).to(v_ptr.dtype.element_ty)
    tl.store(address, largest, mask=mask & is_wrong)


def make_finite(v: torch.Tensor, bounds: torch.Tensor, num_tokens: int) -> None:
    """Puts the largest finite number of its type in place of NaN and inf, the smallest for -inf, in
    the tokens that follow a sequence's last one. Writes nothing else.

    Args:
        v: [N, kv_heads, head_dim], whose tokens may be strided.
        bounds: int32 [num_seqs + 1], where sequences begin and end.
        num_tokens: how many follow.
    """
    width, tokens, num_seqs = v.size(1) * v.size(2), 4, len(bounds) - 1
    assert v.stride()[1:] == (v.size(2), 1)
    _make_finite_kernel[(num_seqs - 1, triton.cdiv(num_tokens, tokens))](
        v,
        bounds,
        v.stride(0),
        len(v),
        NUM_TOKENS=num_tokens,
        LARGEST=torch.finfo(v.dtype).max,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        TOKENS=tokens,
        num_warps=4,
        **chained(v),
    )
