"""The projection to queries, keys and values with RoPE in its epilogue: on a GPU, and run by an
emulator on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import fallback
from nanovllm.kernels.attention.kv_cache import KVCache
from nanovllm.kernels.gemm import hopper_gemm
from nanovllm.kernels.gemm import qkv as module
from nanovllm.kernels.gemm.qkv import HEAD_DIM, qkv_linear, qkv_linear_reference, supports
from nanovllm.kernels.rope import CacheSlots, RopeInputs, apply_rope_and_store_reference
from tests.kernels.gluon_emulator import emulated_gemm
from tests.kernels.oracle import assert_as_good_as_eager

BLOCK_SIZE = 16


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def emulator():
    with emulated_gemm("gemm.qkv_kernel", module):
        yield


def make(num_rows, q_heads, k_heads, width, has_norm, dtype, device):
    """Returns x, the weight, and the inputs of RoPE, with positions and slots in random order."""
    x = torch.randn(num_rows, width, device=device).to(dtype)
    features = (q_heads + 2 * k_heads) * HEAD_DIM
    weight = (torch.randn(features, width, device=device) / width**0.5).to(dtype)
    angles = 6 * torch.rand(num_rows + 5, HEAD_DIM // 2, device=device)
    norms = torch.rand(2, HEAD_DIM, device=device) + 0.5 if has_norm else (None, None)
    if has_norm and q_heads % 2:  # weights of norms may also be fp32 in other models
        norms = norms.to(dtype)
    rope = RopeInputs(
        torch.randperm(num_rows, device=device).int() + 5,
        torch.cat((angles.cos(), angles.sin()), 1),
        *norms,
        1e-6,
    )
    num_blocks = num_rows // BLOCK_SIZE + 2
    slot_mapping = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_rows].int()
    slot_mapping[num_rows // 2] = -1
    return x, weight, rope, slot_mapping, (num_blocks, BLOCK_SIZE, k_heads, HEAD_DIM)


def run(function, x, weight, rope, slot_mapping, shape):
    """Returns queries, keys and values, and the cache, which has zeros elsewhere."""
    cache = KVCache(*x.new_zeros(2, *shape))
    qkv = function(x, weight, rope, CacheSlots(cache, slot_mapping))
    return [qkv, *cache[:2]]


def exact_qkv(x, weight, rope, slots):
    """In fp64, with the weights of the norms rounded where they are."""
    qkv, k_heads = F.linear(x, weight).unflatten(1, (-1, HEAD_DIM)), slots.cache.k.size(2)
    q, k, v = qkv.split((qkv.size(1) - 2 * k_heads, k_heads, k_heads), dim=1)
    if rope.q_weight is not None:
        q, k = (
            heads * heads.square().mean(-1, keepdim=True).add(rope.eps).rsqrt() * weight.double()
            for heads, weight in ((q, rope.q_weight), (k, rope.k_weight))
        )
        rope = rope._replace(q_weight=None, k_weight=None)
    return torch.cat((*apply_rope_and_store_reference(rope, q, k, v, slots), v), dim=1).flatten(1)


def check(num_rows, q_heads, k_heads, width, has_norm, dtype, device) -> None:
    x, weight, *rest = make(num_rows, q_heads, k_heads, width, has_norm, dtype, device)
    found = run(module._launch, x, weight, *rest)
    eager = run(qkv_linear_reference, x, weight, *rest)
    exact = run(exact_qkv, x.double(), weight.double(), *rest)
    for ours, theirs, best in zip(found, eager, exact, strict=True):
        assert_as_good_as_eager(ours, theirs, best)
        assert torch.equal(ours.any(-1), theirs.any(-1))  # slots that are not written


@pytest.mark.parametrize(
    ("num_rows", "q_heads", "k_heads", "width", "has_norm"),
    [(127, 4, 2, 136, True), (300, 3, 1, 200, False), (700, 2, 2, 136, True), (1, 1, 1, 136, True)],
)
def test_the_kernel_in_the_emulator(emulator, num_rows, q_heads, k_heads, width, has_norm, dtype):
    check(num_rows, q_heads, k_heads, width, has_norm, dtype, "cpu")


def test_a_kernel_that_does_not_compile_is_replaced(monkeypatch, caplog):
    def broken(*args: torch.Tensor) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(module, "_launch", broken)
    monkeypatch.setattr(fallback, "_failed", set())
    inputs = make(9, 2, 1, 64, True, torch.bfloat16, "cpu")
    found, expected = run(qkv_linear, *inputs), run(qkv_linear_reference, *inputs)
    assert all(map(torch.equal, found, expected))
    assert fallback._failed == {(module.KERNEL, torch.device("cpu"))}
    assert [r.getMessage() for r in caplog.records] == [
        "the GEMM with RoPE for Hopper failed, so a slower kernel runs: "
        "RuntimeError: PassManager::run failed"
    ]


def test_what_it_supports():
    _, weight, rope, slot_mapping, shape = make(9, 2, 1, 64, True, torch.bfloat16, "cpu")
    cache = KVCache(*weight.new_zeros(2, *shape))
    slots = CacheSlots(cache, slot_mapping)
    assert not hopper_gemm.supports(module.KERNEL, weight)  # on a CPU
    assert supports(rope, slots, weight.dtype)
    assert not supports(rope._replace(cos_sin_cache=torch.empty(99, 64)), slots, weight.dtype)
    quantized = cache._replace(scales=torch.empty(0))
    for other in (quantized, KVCache(*weight.new_zeros(2, *shape, dtype=torch.float16))):
        assert not supports(rope, CacheSlots(other, slot_mapping), weight.dtype)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "q_heads", "k_heads", "width"),
    [
        (1, 1, 1, 136),
        (127, 3, 1, 200),
        (3000, 16, 8, 1024),
        (9001, 14, 2, 896),
        (8192, 32, 8, 4096),
    ],
)
def test_as_good_as_two_kernels(num_rows, q_heads, k_heads, width, has_norm, dtype):
    check(num_rows, q_heads, k_heads, width, has_norm, dtype, "cuda")
