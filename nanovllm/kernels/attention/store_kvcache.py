"""Writes a step's new keys and values into their slots of the paged KV cache."""

import torch


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Stores the keys and values of N tokens in the paged KV cache.

    The kernels of rope.py and decode.py store them along with RoPE. This is their reference.

    Args:
        key, value: [N, kv_heads, head_dim].
        k_cache, v_cache: [blocks, block_size, kv_heads, head_dim], written in place.
        slot_mapping: int32 [N], the slot of each token: block id x block_size + offset in the
            block. A token with slot -1 is not stored.
    """
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        key, value, slot_mapping = key[keep], value[keep], slot_mapping[keep]
    k_cache.flatten(0, 1)[slot_mapping] = key
    v_cache.flatten(0, 1)[slot_mapping] = value
