"""Rotary embedding against transformers' modules, and against fp64 at high positions."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nanovllm.kernels.rope import apply_rope_and_store, apply_rotary_emb
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.rope import read_rope
from nanovllm.utils.rope import RopeConfig

MAX_POSITION = 131072
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# transformers' rope_parameters.
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default-1e6": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "original_max_position_embeddings": 8192,
        **LLAMA3,
    },
    "llama3-other-ramp": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 9.0,
        "original_max_position_embeddings": 256,
    },
}
PLAIN = RopeConfig(tuple(10000.0 ** -(i / 8) for i in range(8)))
each_kind = pytest.mark.parametrize("kind", KINDS)
each_head_dim = pytest.mark.parametrize("head_dim", [2, 40, 64, 128])
HIGH_POSITIONS = torch.tensor([0, 1, 8191, 8192, 32767, 32768, 100_003, MAX_POSITION - 1])


def rotate(rope: Any, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *norms: Any):
    return apply_rope_and_store(rope(positions, *norms), q, k, k, None)


def config_of(kind: str, head_dim: int) -> RopeConfig:
    sizes = {"head_dim": head_dim, "max_position_embeddings": MAX_POSITION}
    return read_rope({**sizes, "rope_parameters": KINDS[kind]})


def oracle(kind: str, head_dim: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=dict(KINDS[kind]),
    )
    return LlamaRotaryEmbedding(config)


def rotate_fp64(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Each pair (i, i + D/2) as a complex number, turned by its angle."""
    turns = torch.polar(torch.ones((), dtype=torch.float64), positions[:, None] * inv_freq)
    real, imaginary = x.double().chunk(2, -1)
    turned = torch.complex(real, imaginary) * turns[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def inv_freq_fp64(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Frequency by frequency, as the papers and Meta's reference code have it."""
    out = []
    for i in range(head_dim // 2):
        freq = rope["rope_theta"] ** (-2 * i / head_dim)
        if rope["rope_type"] == "linear":
            freq /= rope["factor"]
        elif rope["rope_type"] == "llama3":
            original = rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            wavelength = 2 * math.pi / freq
            if wavelength > original / low:
                freq /= rope["factor"]
            elif wavelength >= original / high:
                smooth = (original / wavelength - low) / (high - low)
                freq = (1 - smooth) * freq / rope["factor"] + smooth * freq
        out.append(freq)
    return torch.tensor(out, dtype=torch.float64)


@each_kind
@each_head_dim
def test_equals_transformers(kind, head_dim):
    """At positions where transformers' fp32 angles are good to 1e-4."""
    positions = torch.randint(0, 1000, (50,))
    q, k = torch.randn(50, 6, head_dim), torch.randn(50, 2, head_dim)
    rope = RotaryEmbedding(head_dim, 1000, config_of(kind, head_dim))
    cos, sin = oracle(kind, head_dim)(q, positions[None])
    expected = apply_rotary_pos_emb(q, k, cos[0], sin[0])
    torch.testing.assert_close(rotate(rope, positions, q, k), expected, rtol=0, atol=1e-3)


@each_kind
@each_head_dim
def test_frequencies_equal_transformers(kind, head_dim):
    """Read off the cache at position 1, where no angle has wrapped round."""
    cos, sin = RotaryEmbedding(head_dim, 2, config_of(kind, head_dim)).cos_sin_cache[1].chunk(2)
    expected = oracle(kind, head_dim).inv_freq
    torch.testing.assert_close(torch.atan2(sin, cos), expected, rtol=1e-5, atol=0)


@each_kind
@each_head_dim
def test_high_positions_are_exact(kind, head_dim):
    """Guards angles computed in fp32, which are off by 4e-3 at position 100,000."""
    q, k = torch.randn(8, 6, head_dim), torch.randn(8, 2, head_dim)
    rope = RotaryEmbedding(head_dim, MAX_POSITION, config_of(kind, head_dim))
    inv_freq = inv_freq_fp64(KINDS[kind], head_dim)
    for x, rotated in zip((q, k), rotate(rope, HIGH_POSITIONS, q, k), strict=True):
        expected = rotate_fp64(x, HIGH_POSITIONS, inv_freq)
        torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=3e-6)


@each_kind
def test_scores_depend_on_the_distance_alone(kind):
    rope = RotaryEmbedding(64, MAX_POSITION, config_of(kind, 64))
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        rotated_q, _ = rotate(rope, torch.tensor([q_position]), q, k)
        _, rotated_k = rotate(rope, torch.tensor([k_position]), q, k)
        return (rotated_q * rotated_k).sum()

    near = score(700, 100)
    torch.testing.assert_close(score(130_700, 130_100), near, rtol=0, atol=1e-4)
    assert abs(score(701, 100) - near) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_come_before_the_rotation(dtype):
    """Of each head, as Qwen3 has it."""
    q, k = torch.randn(7, 6, 40).to(dtype), torch.randn(7, 2, 40).to(dtype)
    norms = [RMSNorm(40, eps=1e-3).to(dtype).requires_grad_(False) for _ in "qk"]
    for norm in norms:
        norm.weight.uniform_(0.5, 1.5)
    rope = RotaryEmbedding(40, 100, config_of("default", 40))
    positions = torch.randint(0, 100, (7,))
    found = rotate(rope, positions, q, k, *norms)
    expected = rotate(rope, positions, norms[0](q), norms[1](k))
    assert all(map(torch.equal, found, expected))
    assert not torch.allclose(found[0], rotate(rope, positions, q, k)[0])


def test_position_0_is_the_identity():
    q, k = torch.randn(3, 2, 16), torch.randn(3, 1, 16)
    rotated = rotate(RotaryEmbedding(16, 4, PLAIN), torch.zeros(3, dtype=torch.int64), q, k)
    assert all(map(torch.equal, rotated, (q, k)))


def test_stated_divisors_replace_the_scaling():
    """A GGUF file of Llama 3 states what each frequency is divided by."""
    plain = 500000.0 ** -(torch.arange(32).double() / 32)
    divisors = (plain / inv_freq_fp64(KINDS["llama3"], 64)).tolist()
    stated = read_rope({"head_dim": 64}, {"rope_theta": 500000.0, "freq_divisors": divisors})
    expected = RotaryEmbedding(64, 5000, config_of("llama3", 64)).cos_sin_cache
    torch.testing.assert_close(RotaryEmbedding(64, 5000, stated).cos_sin_cache, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_is_kept_and_inputs_stay_as_they_are(dtype):
    positions = torch.tensor([5, 77, 3])
    q, k = torch.randn(3, 4, 16).to(dtype), torch.randn(3, 2, 16).to(dtype)
    copies = q.clone(), k.clone()
    rope = RotaryEmbedding(16, 100, PLAIN)
    rotated = rotate(rope, positions, q, k)
    assert all(map(torch.equal, (q, k), copies))
    # The rotation runs in fp32 whatever the dtype, so the only error is the last rounding.
    for half, exact in zip(rotated, rotate(rope, positions, q.float(), k.float()), strict=True):
        assert half.dtype == dtype
        assert torch.equal(half, exact.to(dtype))


def test_apply_rotary_emb_turns_halves_against_each_other():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    assert apply_rotary_emb(x, cos, sin).tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


def test_the_cache_is_not_part_of_the_checkpoint():
    rope = RotaryEmbedding(16, 10, PLAIN)
    assert rope.cos_sin_cache.numel() == 10 * 16 and rope.cos_sin_cache.dtype == torch.float32
    assert not rope.state_dict() and not list(rope.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
def test_without_rope_heads_stay_as_they_are(has_norm, dtype):
    """Bit for bit, at any position; a norm before it is applied still."""
    rope, positions = RotaryEmbedding(16, 200, None), torch.tensor([0, 1, 100, 199])
    q, k = torch.randn(4, 4, 16).to(dtype), torch.randn(4, 2, 16).to(dtype)
    norms = (RMSNorm(16), RMSNorm(16)) if has_norm else ()
    for norm in norms:
        norm.weight.data = torch.rand(16).to(dtype)
    expected = tuple(norm(x) for norm, x in zip(norms, (q, k), strict=True)) if norms else (q, k)
    found = rotate(rope, positions, q, k, *norms)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
