"""Rotary embedding (RoPE), fused with the RMSNorm of heads before it (in models with q/k norm) and
the store into the KV cache after it."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.attention.kv_cache import KVCache, scale_offset, store_kvcache
from nanovllm.kernels.fp8 import fp8_scale
from nanovllm.kernels.rms_norm import rms_norm_reference
from nanovllm.utils.math import cdiv
from nanovllm.utils.triton_compat import by_device, pdl_options, pdl_wait, tl, triton

BLOCK_HEADS = 8  # heads per program


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + D/2) of each head of x [N, H, D]; cos and sin are fp32
    [N, 1, D/2]."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


class RopeInputs(NamedTuple):
    """Inputs of the rotary embedding besides queries and keys.

    Attributes:
        positions: int32 [N].
        cos_sin_cache: fp32 [max_position, D], D/2 cosines then D/2 sines.
        q_weight, k_weight: [D], weights of an RMSNorm of each head before RoPE; both or neither.
        eps: eps of the RMSNorm.
    """

    positions: Tensor
    cos_sin_cache: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0


class NewKV(NamedTuple):
    """The new keys and values of a decode step, before RoPE and before they are stored.

    Attributes:
        rope: rotary embedding to apply to queries and keys.
        k, v: [N, kv_heads, D].
    """

    rope: RopeInputs
    k: Tensor
    v: Tensor


class CacheSlots(NamedTuple):
    """The KV cache and the slots that new keys and values are written to.

    Attributes:
        slot_mapping: int32 [N], the slot of each token. A token with slot -1 is not stored.
    """

    cache: KVCache
    slot_mapping: Tensor


def apply_rope_and_store_reference(
    rope: RopeInputs, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None
) -> tuple[Tensor, Tensor]:
    """Applies RoPE to queries and keys, and stores keys and values in the KV cache.

    Args:
        rope: positions, cosines and sines, and weights of the norms before RoPE, if any.
        q: [N, heads, D].
        k, v: [N, kv_heads, D].
        slots: where to store; None stores nothing.

    Returns:
        q and k after RoPE, contiguous.
    """
    if rope.q_weight is not None and rope.k_weight is not None:
        q = rms_norm_reference(q, rope.q_weight, rope.eps)[0]
        k = rms_norm_reference(k, rope.k_weight, rope.eps)[0]
    cos, sin = rope.cos_sin_cache[rope.positions].unsqueeze(1).chunk(2, dim=-1)
    q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
    if slots is not None:
        store_kvcache(k, v, *slots)
    return q, k


@triton.jit
def _quantize_and_store_scales(x1, x2, mask, scales_ptr, scales_mask):
    """Quantises heads, given as two halves [H, D / 2], and stores their scales [H, 1]."""
    x1 = tl.where(mask, x1.to(tl.float32), 0.0)
    x2 = tl.where(mask, x2.to(tl.float32), 0.0)
    largest = tl.max(tl.maximum(tl.abs(x1), tl.abs(x2)), axis=1)[:, None]
    scale, inverse = fp8_scale(largest)
    tl.store(scales_ptr, scale, mask=scales_mask)
    return (x1 * inverse).to(tl.float8e4nv), (x2 * inverse).to(tl.float8e4nv)


@triton.jit
def _apply_rope_and_store_kernel(
    positions_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    scales_ptr,
    slot_mapping_ptr,
    cos_sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_stride,
    k_stride,
    v_stride,
    eps,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_HEADS: tl.constexpr = BLOCK_HEADS,
):
    # A program handles BLOCK_HEADS heads of one token, query heads or key heads, and stores keys
    # with their values. Programs process tokens from last to first. The previous kernel wrote the
    # last tokens most recently, so they may still be in the L2 cache. A KV cache can hold over 2^31
    # elements, so its offsets are 64-bit.
    NUM_Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    NUM_BLOCKS: tl.constexpr = NUM_Q_BLOCKS + (K_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    token = (program // NUM_BLOCKS).to(tl.int64)
    block = program % NUM_BLOCKS
    is_key = block >= NUM_Q_BLOCKS
    if is_key:
        block -= NUM_Q_BLOCKS
        x_ptr = k_ptr + token * k_stride
        out_ptr = k_out_ptr + token * K_HEADS * HALF * 2
        weight_ptr = k_weight_ptr
        num_heads = K_HEADS
    else:
        x_ptr = q_ptr + token * q_stride
        out_ptr = q_out_ptr + token * Q_HEADS * HALF * 2
        weight_ptr = q_weight_ptr
        num_heads = Q_HEADS
    head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    in_head = column < HALF
    mask = (head < num_heads) & in_head
    offset = head * (HALF * 2) + column
    # What does not depend on the previous kernel is loaded before its end is waited for.
    position = tl.load(positions_ptr + token)
    cos_sin = cos_sin_ptr + position * (HALF * 2) + column
    cos = tl.load(cos_sin, mask=in_head, other=0.0)
    sin = tl.load(cos_sin + HALF, mask=in_head, other=0.0)
    if HAS_NORM:
        w1 = tl.load(weight_ptr + column, mask=in_head, other=0.0)
        w2 = tl.load(weight_ptr + HALF + column, mask=in_head, other=0.0)
    pdl_wait(PDL)
    raw1 = tl.load(x_ptr + offset, mask=mask, other=0.0)
    raw2 = tl.load(x_ptr + offset + HALF, mask=mask, other=0.0)
    x1 = raw1.to(tl.float32)
    x2 = raw2.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1) / (HALF * 2)
        scale = tl.rsqrt(squares + eps)[:, None]
        # Rounds where rms_norm_reference rounds.
        x1 = ((x1 * scale).to(w1.dtype) * w1).to(raw1.dtype).to(tl.float32)
        x2 = ((x2 * scale).to(w2.dtype) * w2).to(raw2.dtype).to(tl.float32)
    out1 = (x1 * cos - x2 * sin).to(raw1.dtype)
    out2 = (x2 * cos + x1 * sin).to(raw1.dtype)
    tl.store(out_ptr + offset, out1, mask=mask)
    tl.store(out_ptr + offset + HALF, out2, mask=mask)
    if k_cache_ptr is not None:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        if is_key & (slot >= 0):
            v1 = tl.load(v_ptr + token * v_stride + offset, mask=mask)
            v2 = tl.load(v_ptr + token * v_stride + offset + HALF, mask=mask)
            k1, k2 = out1, out2
            if scales_ptr is not None:
                place = scale_offset(
                    slot // BLOCK_SIZE, slot % BLOCK_SIZE, head, K_HEADS, BLOCK_SIZE
                )
                k_scales, is_head = scales_ptr + place, head < K_HEADS
                k1, k2 = _quantize_and_store_scales(k1, k2, mask, k_scales, is_head)
                v_scales = k_scales + K_HEADS * BLOCK_SIZE
                v1, v2 = _quantize_and_store_scales(v1, v2, mask, v_scales, is_head)
            start = slot * (K_HEADS * HALF * 2)
            tl.store(k_cache_ptr + start + offset, k1, mask=mask)
            tl.store(k_cache_ptr + start + offset + HALF, k2, mask=mask)
            tl.store(v_cache_ptr + start + offset, v1, mask=mask)
            tl.store(v_cache_ptr + start + offset + HALF, v2, mask=mask)


def apply_rope_and_store_triton(
    rope: RopeInputs, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots | None
) -> tuple[Tensor, Tensor]:
    """See ``apply_rope_and_store_reference``. The heads of a token must be contiguous, and tokens
    may be strided."""
    num_tokens, q_heads, head_dim = q.shape
    k_heads = k.size(1)
    assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (head_dim, 1)
    assert head_dim % 2 == 0 and rope.positions.shape == (num_tokens,)
    assert rope.cos_sin_cache.is_contiguous()
    k_cache, v_cache, scales, slot_mapping, block_size = None, None, None, None, 0
    if slots is not None:
        (k_cache, v_cache, scales), slot_mapping = slots
        if scales is not None:
            block_size = k_cache.size(1)
            assert scales.is_contiguous()
        assert k_cache.is_contiguous() and v_cache.is_contiguous()
        assert k_cache.shape == v_cache.shape and slot_mapping.shape == (num_tokens,)
        assert k_cache.shape[2:] == k.shape[1:] == v.shape[1:]
    q_out = q.new_empty(num_tokens, q_heads, head_dim)
    k_out = k.new_empty(num_tokens, k_heads, head_dim)
    has_norm = rope.q_weight is not None
    num_blocks = cdiv(q_heads, BLOCK_HEADS) + cdiv(k_heads, BLOCK_HEADS)
    _apply_rope_and_store_kernel[(num_tokens * num_blocks,)](
        rope.positions,
        q,
        k,
        v,
        q_out,
        k_out,
        k_cache,
        v_cache,
        scales,
        slot_mapping,
        rope.cos_sin_cache,
        rope.q_weight if has_norm else q,
        rope.k_weight if has_norm else k,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        rope.eps,
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        HAS_NORM=has_norm,
        num_warps=2,
        **pdl_options(q),
    )
    return q_out, k_out


apply_rope_and_store = by_device(
    apply_rope_and_store_reference, apply_rope_and_store_triton, tensor=1
)
