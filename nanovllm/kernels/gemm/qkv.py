"""The projection to queries, keys and values, with the norms of heads, RoPE, and the store into
the KV cache in its epilogue, for prefills on Hopper: the launcher of qkv_kernel.py."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.fallback import run_or_replace
from nanovllm.kernels.gemm.hopper_gemm import BLOCK_K, BLOCK_N, ROWS, describe_inputs
from nanovllm.kernels.rope import CacheSlots, RopeInputs, apply_rope_and_store
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import num_multiprocessors

KERNEL = "GEMM with RoPE"
HEAD_DIM = BLOCK_N


def supports(rope: RopeInputs, slots: CacheSlots, dtype: torch.dtype) -> bool:
    """Returns whether ``qkv_linear`` can apply this RoPE to keys of a dtype, and store them.
    ``hopper_gemm.supports`` returns whether it can multiply by a weight."""
    k_cache, _, scales = slots.cache
    return rope.cos_sin_cache.size(1) == HEAD_DIM and scales is None and k_cache.dtype is dtype


def qkv_linear(x: Tensor, weight: Tensor, rope: RopeInputs, slots: CacheSlots) -> Tensor:
    """Computes queries, keys and values, without a bias, does with them what
    ``apply_rope_and_store`` does, and returns them. Heads are not rounded before their norm. If the
    kernel does not compile, which is logged once, other kernels do it.

    Args:
        x: [N, in], fp16 or bf16, contiguous.
        weight: [heads * HEAD_DIM, in], the rows of all query heads, key heads and value heads,
            contiguous.

    Returns:
        [N, heads * HEAD_DIM].
    """
    return run_or_replace(
        KERNEL,
        x.device,
        lambda: _launch(x, weight, rope, slots),
        lambda: qkv_linear_reference(x, weight, rope, slots),
    )


def qkv_linear_reference(x: Tensor, weight: Tensor, rope: RopeInputs, slots: CacheSlots) -> Tensor:
    """Computes what ``qkv_linear`` does, in several kernels."""
    qkv, k_heads = F.linear(x, weight).unflatten(1, (-1, HEAD_DIM)), slots.cache.k.size(2)
    q, k, v = qkv.split((qkv.size(1) - 2 * k_heads, k_heads, k_heads), dim=1)
    return torch.cat((*apply_rope_and_store(rope, q, k, v, slots), v), dim=1).flatten(1)


def _launch(x: Tensor, weight: Tensor, rope: RopeInputs, slots: CacheSlots) -> Tensor:
    x_desc, weight_desc = describe_inputs(x, weight)
    # Deferred, because Gluon is experimental: the caller can do without it.
    from nanovllm.kernels.gemm.qkv_kernel import qkv_kernel

    (k_cache, v_cache, _), k_heads = slots.cache, slots.cache.k.size(2)
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.size(3) == HEAD_DIM
    assert rope.cos_sin_cache.is_contiguous()
    assert len(rope.positions) == len(slots.slot_mapping) == len(x)
    out, num_heads = x.new_empty(len(x), len(weight)), len(weight) // HEAD_DIM
    num_m, num_n = cdiv(len(x), 2 * ROWS), cdiv(len(weight), 2 * BLOCK_N)
    qkv_kernel[(min(num_m * num_n, num_multiprocessors(x.device)),)](
        x_desc,
        weight_desc,
        out,
        rope.positions,
        slots.slot_mapping,
        rope.cos_sin_cache,
        k_cache,
        v_cache,
        rope.q_weight,
        rope.k_weight,
        len(x),
        num_m,
        num_n,
        cdiv(x.size(1), BLOCK_K),
        rope.eps,
        num_heads - 2 * k_heads,
        k_heads,
        num_warps=4,
    )
    return out
