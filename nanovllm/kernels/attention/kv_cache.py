"""The paged KV cache of a layer, and how a step's new keys and values are stored in it.

A quantised cache holds keys and values in FP8 (e4m3). Each token and KV head has two scales: the
largest magnitude of its key, and of its value, divided by the largest FP8 number. So the scales
depend on nothing but the token's own key and value, and need no calibration.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.fp8 import quantize
from nanovllm.utils.triton_compat import tl, triton

SCALE_BYTES = 4


class KVCache(NamedTuple):
    """The paged KV cache of one attention layer.

    Attributes:
        k, v: [blocks, block_size, kv_heads, head_dim], in the model's dtype, or in FP8.
        scales: fp32 [blocks, 2, kv_heads, block_size], the scales of keys, then of values. A key
            or value is its FP8 numbers times its scale. None if the cache is not quantised.
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None = None


def vector_bytes(head_dim: int, itemsize: int, is_quantized: bool) -> int:
    """Returns the bytes of one token's key, or value, of one KV head in the cache.

    Args:
        itemsize: bytes per element, if the cache is not quantised.
    """
    return head_dim + SCALE_BYTES if is_quantized else head_dim * itemsize


@triton.jit
def scale_offset(block, slot, head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Returns where the scale of a key is among a layer's scales. That of the value is KV_HEADS x
    BLOCK_SIZE further.

    Args:
        block: the block's id, 64-bit.
        slot: the token's place in the block.
    """
    return (block * (2 * KV_HEADS) + head) * BLOCK_SIZE + slot


def store_kvcache(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Stores the keys and values of N tokens in the paged KV cache.

    The kernels of rope.py, decode.py and gemm/qkv.py store them along with RoPE. This is their
    reference.

    Args:
        key, value: [N, kv_heads, head_dim].
        cache: written in place.
        slot_mapping: int32 [N], the slot of each token: block id x block_size + offset in the
            block. A token with slot -1 is not stored.
    """
    keep = slot_mapping >= 0
    if not bool(keep.all()):
        key, value, slot_mapping = key[keep], value[keep], slot_mapping[keep]
    if cache.scales is not None:
        (key, key_scale), (value, value_scale) = quantize(key), quantize(value)
        block_size = cache.k.size(1)
        block, offset = slot_mapping // block_size, slot_mapping % block_size
        cache.scales[block, :, :, offset] = torch.stack((key_scale, value_scale), dim=1)
    cache.k.flatten(0, 1)[slot_mapping] = key
    cache.v.flatten(0, 1)[slot_mapping] = value
