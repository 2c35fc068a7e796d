import pytest
import torch

from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.rope import (
    CacheSlots,
    RopeInputs,
    apply_rope_and_store_reference,
    apply_rope_and_store_triton,
)
from tests.kernels.oracle import assert_as_good_as_eager, poisoned


@pytest.mark.parametrize("with_norm", [False, True, "fp32"])
@pytest.mark.parametrize(
    ("tokens", "q_heads", "k_heads", "head_dim"),
    [(1, 1, 1, 64), (5, 9, 3, 64), (3, 4, 2, 96), (4, 16, 8, 128), (2, 2, 2, 256), (3, 3, 1, 6)],
)
def test_rope_of_strided_heads(
    tokens, q_heads, k_heads, head_dim, with_norm, dtype, device, monkeypatch
):
    poisoned(monkeypatch)
    qkv = torch.randn(tokens, q_heads + 2 * k_heads, head_dim, device=device).to(dtype)
    q, k, v = qkv.split((q_heads, k_heads, k_heads), dim=1)
    before = qkv.clone()
    positions = torch.randint(0, 50, (tokens,), dtype=torch.int32, device=device)
    angles = torch.rand(50, head_dim // 2, device=device) * 6
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    weights = (None, None)
    if with_norm:
        weight_dtype = torch.float32 if with_norm == "fp32" else dtype
        weights = tuple(
            torch.rand(head_dim, device=device).to(weight_dtype) + 0.5 for _ in range(2)
        )
    rope = RopeInputs(positions, cache, *weights, 1e-6)
    ours = apply_rope_and_store_triton(rope, q, k, v, None)
    eager = apply_rope_and_store_reference(rope, q, k, v, None)
    wide = tuple(None if w is None else w.double() for w in weights)
    for a, b, given, w in zip(ours, eager, (q, k), wide, strict=True):
        x = given.double()
        if w is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w
        cos, sin = cache.double()[positions].unsqueeze(1).chunk(2, -1)
        x1, x2 = x.chunk(2, -1)
        exact = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
        assert_as_good_as_eager(a, b, exact)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize(
    ("tokens", "q_heads", "k_heads", "head_dim", "block_size"),
    [(1, 1, 1, 64, 16), (7, 9, 3, 64, 3), (5, 4, 2, 96, 8), (6, 3, 1, 6, 1)],
)
def test_keys_and_values_land_in_their_slots(
    tokens, q_heads, k_heads, head_dim, block_size, device, monkeypatch
):
    """And only there: slot -1 stores nothing."""
    poisoned(monkeypatch)
    qkv = torch.randn(tokens, q_heads + 2 * k_heads, head_dim, device=device)
    q, k, v = qkv.split((q_heads, k_heads, k_heads), dim=1)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    cos_sin = torch.rand(50, head_dim, device=device)
    slots = torch.randperm(4 * block_size + 4, device=device)[:tokens].int()
    slots[tokens // 2 :: 3] = -1
    caches = torch.full((2, 8, block_size, k_heads, head_dim), 7.0, device=device)
    found = apply_rope_and_store_triton(
        RopeInputs(positions, cos_sin), q, k, v, CacheSlots(KVCache(*caches), slots)
    )
    unstored = apply_rope_and_store_triton(RopeInputs(positions, cos_sin), q, k, v, None)
    assert all(torch.equal(a, b) for a, b in zip(found, unstored, strict=True))
    expected = torch.full_like(caches, 7.0).flatten(1, 2)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot], expected[1, slot] = found[1][token], v[token]
    assert torch.equal(caches.flatten(1, 2), expected)
