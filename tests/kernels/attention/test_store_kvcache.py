"""Writing new keys and values into the paged cache: the kernel that does so after RoPE, and its
reference."""

import pytest
import torch

from nanovllm.kernels.attention.kv_cache import KVCache, store_kvcache, vector_bytes
from nanovllm.kernels.fp8 import FP8, quantize
from nanovllm.kernels.rope import CacheSlots, RopeInputs, apply_rope_and_store_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (kv_heads, head_dim): powers of two, and widths between them.
HEADS = [(1, 2), (2, 16), (8, 128), (3, 40), (5, 18), (1, 96)]
NUM_BLOCKS = 6
# Each token is a program of its own; the interpreter takes its time.
MAX_TOKENS = 99 if DEVICE == "cuda" else 11


def store_after_rope(
    key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor
) -> None:
    """Runs the kernel with angles of 0."""
    head_dim = key.size(2)
    cos_sin = (torch.arange(head_dim, device=DEVICE) < head_dim // 2).float().unsqueeze(0)
    rope = RopeInputs(torch.zeros(len(key), dtype=torch.int32, device=DEVICE), cos_sin)
    slots = CacheSlots(cache, slot_mapping)
    apply_rope_and_store_triton(rope, key, key, value, slots)


STORES = [store_after_rope, store_kvcache]
each_store = pytest.mark.parametrize("store", STORES, ids=lambda store: store.__name__)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(num_tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, *heads).to(dtype).to(DEVICE)


def poisoned(
    block_size: int, heads: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of NaNs, and the cache in the middle of it: a slot that is out of bounds lands
    where it shows."""
    shape = (NUM_BLOCKS + 2, block_size, *heads)
    memory = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    return memory, memory[1:-1]


def check(
    store,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: list[int],
    block_size: int,
) -> None:
    """After ``store`` each slot holds its token bit for bit, and every other one its poison."""
    heads, dtype = key.shape[1:], key.dtype
    (k_memory, k_cache), (v_memory, v_cache) = (
        poisoned(block_size, heads, dtype) for _ in range(2)
    )
    k_expected, v_expected = k_memory.clone(), v_memory.clone()
    for i, slot in enumerate(slots):
        if slot >= 0:
            k_expected[1 + slot // block_size, slot % block_size] = key[i]
            v_expected[1 + slot // block_size, slot % block_size] = value[i]
    cache = KVCache(k_cache, v_cache)
    store(key, value, cache, torch.tensor(slots, dtype=torch.int64, device=DEVICE))
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(k_memory, k_expected, **exact)
    torch.testing.assert_close(v_memory, v_expected, **exact)


@each_store
@each_dtype
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}x{heads[1]}")
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_any_width_and_block_size(block_size, heads, dtype, store):
    """Guards nano-vLLM's kernel, which needed a power-of-two width."""
    num_tokens = min(NUM_BLOCKS * block_size - 1, MAX_TOKENS)
    slots = torch.randperm(NUM_BLOCKS * block_size)[:num_tokens].tolist()
    check(store, draw(num_tokens, heads, dtype), draw(num_tokens, heads, dtype), slots, block_size)


@each_store
@pytest.mark.parametrize(
    "slots", [[-1, 7, -1, 0, 11, -1], [-1] * 6, [3]], ids=["some", "all", "none"]
)
def test_slot_minus_one_is_skipped(slots, store):
    """Guards a -1 that is taken for the last slot, or for the one before the first."""
    key, value = (draw(len(slots), (3, 40), torch.float32) for _ in range(2))
    check(store, key, value, slots, block_size=2)


@each_store
@each_dtype
def test_views_into_the_packed_projection(dtype, store):
    """k and v as the attention layer gets them: tokens a whole q, k, v row apart."""
    packed = draw(8, (6 + 2 * 3, 40), dtype)
    _, key, value = packed.split((6, 3, 3), dim=1)
    assert not key.is_contiguous()
    check(store, key, value, [4, 9, 0, 11, -1, 2, 7, 5], block_size=2)


@each_store
def test_key_and_value_have_strides_of_their_own(store):
    """After the rotation the keys are contiguous while the values are still a view."""
    packed = draw(5, (4, 16), torch.float32)
    check(store, draw(5, (2, 16), torch.float32), packed[:, 2:], [8, 1, -1, 3, 0], block_size=3)


@each_store
def test_no_other_token_is_overwritten(store):
    """A second step leaves the first one's tokens alone."""
    heads, dtype = (3, 40), torch.float32
    cache = KVCache(*(poisoned(4, heads, dtype)[1] for _ in range(2)))
    for slots in ([0, 1, 2], [3, 9]):
        key, value = draw(len(slots), heads, dtype), draw(len(slots), heads, dtype)
        store(key, value, cache, torch.tensor(slots, device=DEVICE))
    written = ~cache.k.flatten(0, 1).isnan().flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [0, 1, 2, 3, 9]
    assert torch.equal(written, ~cache.v.flatten(0, 1).isnan().flatten(1).any(1))


def plain_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    smallest, largest = torch.tensor([1e-30, 448.0], device=x.device)
    scale = x.float().abs().amax(-1).maximum(smallest) / largest
    return (x.float() * (1 / scale)[..., None]).to(torch.float8_e4m3fn), scale


@each_store
@each_dtype
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}x{heads[1]}")
@pytest.mark.usefixtures("exact_fp8")
def test_fp8_numbers_and_scales_are_those_of_a_plain_quantizer(heads, dtype, store):
    """Bit for bit, in views into the packed projection, for magnitudes from 1e-4 to 1e4 and zeros.
    Other slots keep their poison."""
    slots, block_size, (kv_heads, _) = [4, 9, 0, 11, -1, 2, 7, 5], 3, heads
    packed = draw(8, (2 * kv_heads, heads[1]), torch.float32)
    packed *= torch.logspace(-4, 4, 8, device=DEVICE)[torch.randperm(8)][:, None, None]
    packed[3, 0], packed[5, -1] = 0, 0
    key, value = packed.to(dtype).split(kv_heads, dim=1)
    numbers = torch.full((2, 4, block_size, *heads), torch.nan, device=DEVICE).to(FP8)
    scales = torch.full((4, 2, kv_heads, block_size), -1.0, device=DEVICE)
    expected, expected_scales = numbers.clone(), scales.clone()
    for token, slot in enumerate(slots):
        for i, x in enumerate((key, value)):
            if slot >= 0:
                block, place = slot // block_size, slot % block_size
                expected[i, block, place], row = plain_quantize(x[token])
                expected_scales[block, i, :, place] = row
    store(key, value, KVCache(*numbers, scales), torch.tensor(slots, device=DEVICE))
    assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_quantization_errors_are_half_a_unit_in_the_last_place():
    """Of FP8 numbers: 3 bits of mantissa, and numbers below 2^-6 in steps of 2^-9."""
    for dtype in DTYPES:
        x = draw(1000, (2, 64), dtype) * 10.0 ** torch.randint(-3, 4, (1000, 1, 1), device=DEVICE)
        x[5] = 0
        numbers, scale = quantize(x)
        found = numbers.double() * scale.double().unsqueeze(-1)
        bound = torch.maximum(x.double().abs() / 16, scale.double().unsqueeze(-1) / 1024)
        assert ((found - x.double()).abs() <= bound * (1 + 1e-6)).all()
        assert not found[5].any()


def test_not_a_number_stays_one():
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(2, 8)
        x[0, 3] = bad
        numbers, scale = quantize(x)
        assert (numbers.float() * scale.unsqueeze(-1))[0, 3].isnan()
        torch.testing.assert_close(numbers[1].float() * scale[1], x[1])


def test_a_quantized_cache_holds_almost_twice_as_many_tokens():
    for head_dim, ratio in ((128, 1.93), (64, 1.88)):
        assert vector_bytes(head_dim, 2, False) / vector_bytes(head_dim, 2, True) > ratio


# Two caches of 2^31 elements and a bit. Pages that nothing touches take no memory. Below each cache
# lies as much again, so that an offset that wraps round to a negative one lands there and not in
# another's memory.
GUARD = 2**31


def huge_cache(heads: tuple[int, int]) -> torch.Tensor:
    width = heads[0] * heads[1]
    num_slots = 2**31 // width + 4
    memory = torch.empty(GUARD + num_slots * width, dtype=torch.float16, device=DEVICE)
    return memory[GUARD:].view(num_slots // 2, 2, *heads)


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32], ids=str)
def test_slots_beyond_2_to_the_31_elements(slot_dtype):
    """Guards nano-vLLM's 32-bit offsets, which wrap round in caches of over 2^31 elements."""
    heads = (2, 64)
    cache = KVCache(huge_cache(heads), huge_cache(heads))
    slots = [2**31 // 128 + 1, 0, cache.k.size(0) * 2 - 1]
    key, value = (draw(3, heads, torch.float16) for _ in "kv")
    store_after_rope(key, value, cache, torch.tensor(slots, dtype=slot_dtype, device=DEVICE))
    assert torch.equal(cache.k.flatten(0, 1)[slots], key)
    assert torch.equal(cache.v.flatten(0, 1)[slots], value)


def test_tokens_beyond_2_to_the_31_elements():
    """The same for the offsets of the tokens that are read."""
    heads = (2, 64)
    source = huge_cache(heads).flatten()
    key = source.as_strided((3, *heads), (2**30, 64, 1), source.storage_offset())
    key.copy_(draw(3, heads, torch.float16))
    k_cache = torch.zeros(2, 2, *heads, dtype=torch.float16, device=DEVICE)
    cache = KVCache(k_cache, torch.zeros_like(k_cache))
    store_after_rope(key, key, cache, torch.tensor([3, 0, 2], device=DEVICE))
    assert torch.equal(cache.k.flatten(0, 1)[[3, 0, 2]], key)
    assert torch.equal(cache.v, cache.k)
