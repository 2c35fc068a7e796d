"""The paged KV cache of a layer, and how a step's new keys and values are stored in it."""

from typing import NamedTuple

from torch import Tensor


class KVCache(NamedTuple):
    """The paged KV cache of one attention layer.

    Attributes:
        k, v: [blocks, block_size, kv_heads, head_dim].
    """

    k: Tensor
    v: Tensor


def store_kvcache(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Stores the keys and values of N tokens in the paged KV cache.

    The kernels of rope.py and decode.py store them along with RoPE. This is their reference.

    Args:
        key, value: [N, kv_heads, head_dim].
        cache: written in place.
        slot_mapping: int32 [N], the slot of each token: block id x block_size + offset in the
            block. A token with slot -1 is not stored.
    """
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        key, value, slot_mapping = key[keep], value[keep], slot_mapping[keep]
    cache.k.flatten(0, 1)[slot_mapping] = key
    cache.v.flatten(0, 1)[slot_mapping] = value
