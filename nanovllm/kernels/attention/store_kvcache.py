"""Writes a step's new keys and values into their slots of the paged KV cache."""

import torch

from nanovllm.utils.triton_compat import pdl_options, tl, triton, use_triton


def store_kvcache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See ``store_kvcache``."""
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        key, value, slot_mapping = key[keep], value[keep], slot_mapping[keep]
    k_cache.flatten(0, 1)[slot_mapping] = key
    v_cache.flatten(0, 1)[slot_mapping] = value


@triton.jit
def _store_kvcache_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # One program per token. Slot -1 (padding, or a token that is already cached) writes nothing.
    # A cache can hold over 2^31 elements, so offsets are 64-bit.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        mask = column < WIDTH
        key = tl.load(key_ptr + token * key_stride + column, mask=mask)
        value = tl.load(value_ptr + token * value_stride + column, mask=mask)
        tl.store(k_cache_ptr + slot * WIDTH + column, key, mask=mask)
        tl.store(v_cache_ptr + slot * WIDTH + column, value, mask=mask)


def store_kvcache_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See ``store_kvcache``. The [kv_heads, head_dim] of a token must be contiguous, and tokens may
    be strided, as in views of the packed q, k and v."""
    num_tokens, num_kv_heads, head_dim = key.shape
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1)
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert k_cache.shape == v_cache.shape and k_cache.shape[2:] == key.shape[1:]
    assert slot_mapping.shape == (num_tokens,)
    width = num_kv_heads * head_dim
    _store_kvcache_kernel[(num_tokens,)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        **pdl_options(key),
    )


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Stores the keys and values of N tokens in the paged KV cache.

    Args:
        key, value: [N, kv_heads, head_dim].
        k_cache, v_cache: [blocks, block_size, kv_heads, head_dim], written in place.
        slot_mapping: int32 [N], the slot of each token: block id x block_size + offset in the
            block. A token with slot -1 is not stored.
    """
    store = store_kvcache_triton if use_triton(key) else store_kvcache_reference
    store(key, value, k_cache, v_cache, slot_mapping)
